# Compiles through ccache where it is installed. Paths below the source tree are made relative, so
# a second clone finds what the first one compiled; the sloppiness is what ccache asks for to cache
# compilations that use a precompiled header.
find_program(LIGATURE_CCACHE ccache DOC "ccache, or OFF to compile without it")
mark_as_advanced(LIGATURE_CCACHE)
if(LIGATURE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
    CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    ${LIGATURE_CCACHE})
endif()
if(LIGATURE_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
