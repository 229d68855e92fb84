# at::parallel_for is a template: it runs on torch's threads only where the code that calls it is
# compiled with OpenMP. What it calls must be the OpenMP library that torch has loaded, since two of
# them in one process keep two pools of threads; a wheel of torch brings its own.
file(GLOB LIGATURE_TORCH_GOMP ${LIGATURE_TORCH_ROOT}/lib/libgomp*.so*)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND LIGATURE_TORCH_GOMP)
  list(GET LIGATURE_TORCH_GOMP 0 gomp)
  target_compile_options(ligature PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  target_link_libraries(ligature PRIVATE ${gomp})
else()
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  target_compile_options(ligature PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${OpenMP_CXX_FLAGS}>)
  target_link_libraries(ligature PRIVATE ${OpenMP_CXX_LIBRARIES})
endif()
