# What the library knows of its own build: version.cpp and config.cpp are told here.
set_source_files_properties(ligature/version.cpp PROPERTIES
  COMPILE_DEFINITIONS LIGATURE_VERSION="${LIGATURE_VERSION}")

string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}" flags)
if(LIGATURE_SANITIZE)
  string(APPEND flags " -fsanitize=${LIGATURE_SANITIZE}")
endif()

set(cuda_sources ${LIGATURE_SOURCES})
list(FILTER cuda_sources INCLUDE REGEX "/ligature/backend/cuda/")
file(GLOB_RECURSE cuda_files ${PROJECT_SOURCE_DIR}/ligature/backend/cuda/*)
if(cuda_sources)
  set(why_not_cuda "")
elseif(NOT cuda_files)
  set(why_not_cuda "this version has no CUDA kernels of its own")
else()
  set(why_not_cuda "built with LIGATURE_CUDA=OFF")
endif()

set_source_files_properties(ligature/config.cpp PROPERTIES COMPILE_DEFINITIONS
  "LIGATURE_BUILD_TYPE=\"$<CONFIG>\";LIGATURE_CXX_FLAGS=\"${flags}\";LIGATURE_WHY_NOT_CUDA=\"${why_not_cuda}\"")
