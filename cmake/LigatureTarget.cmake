# ligature_target(<target>): how all of Ligature's own code is compiled.
function(ligature_target target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wextra-semi
    $<$<BOOL:${LIGATURE_WARNINGS_AS_ERRORS}>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # -fpch-preprocess lets ccache see the precompiled header; the other warnings are ones that GCC
    # raises falsely on code it has inlined from torch's headers.
    target_compile_options(${target} PRIVATE -fpch-preprocess -Wno-maybe-uninitialized
      -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread -Wno-restrict)
  endif()
  if(LIGATURE_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${LIGATURE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${LIGATURE_SANITIZE})
  endif()
endfunction()
