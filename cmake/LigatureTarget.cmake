# ligature_target(<target>): how all of Ligature's own code is compiled.

# __FILE__, in torch's messages, starts at the source tree or at torch's headers: what is built is the
# same wherever it is built. The last option that fits counts. Below the source tree ccache hands
# relative paths to the compiler; an absolute one among the options would make another clone miss.
set(LIGATURE_FILE_NAMES "")
foreach(dir IN ITEMS ${PROJECT_SOURCE_DIR} ${LIGATURE_TORCH_ROOT}/include)
  cmake_path(IS_PREFIX PROJECT_SOURCE_DIR ${dir} below)
  if(LIGATURE_CCACHE AND below)
    file(RELATIVE_PATH dir ${PROJECT_BINARY_DIR} ${dir})
    string(REGEX REPLACE "/$" "" dir ${dir})
  endif()
  list(APPEND LIGATURE_FILE_NAMES -fmacro-prefix-map=${dir}/=)
endforeach()

function(ligature_target target)
  set(options ${LIGATURE_FILE_NAMES}
    -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wextra-semi)
  if(LIGATURE_WARNINGS_AS_ERRORS)
    list(APPEND options -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # -fpch-preprocess lets ccache see the precompiled header; the other warnings are ones that GCC
    # raises falsely on code it has inlined from torch's headers.
    list(APPEND options -fpch-preprocess -Wno-maybe-uninitialized -Wno-array-bounds
      -Wno-stringop-overflow -Wno-stringop-overread -Wno-restrict)
    if(LIGATURE_UNITY)
      # Meant for headers, which a source that is compiled with others looks like.
      list(APPEND options -Wno-subobject-linkage)
    endif()
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${options}>")
  if(LIGATURE_CUDA)
    # The code that nvcc makes of a kernel for the host is not written by us.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
  endif()
  if(LIGATURE_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${LIGATURE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${LIGATURE_SANITIZE})
  endif()
endfunction()

# ligature_unity(<target> <dir> <group>...): the files of a group, one folder below <dir> or several
# joined by +, are compiled as one. Most of what a small file costs are the templates of torch's
# headers, which the compiler then makes once. "root" is <dir> itself.
function(ligature_unity target dir)
  if(NOT LIGATURE_UNITY)
    return()
  endif()
  foreach(group IN LISTS ARGN)
    string(REPLACE "+" ";" folders ${group})
    foreach(folder IN LISTS folders)
      string(REGEX REPLACE "^root$" "." folder ${folder})
      file(GLOB sources ${dir}/${folder}/*.cpp)
      string(MAKE_C_IDENTIFIER ${group} name)
      set_source_files_properties(${sources} PROPERTIES UNITY_GROUP ${name})
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    UNITY_BUILD_RELOCATABLE ON)
endfunction()
