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
