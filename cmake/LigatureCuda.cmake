# What the CUDA backend needs beyond a CUDA torch: nvcc, the architectures to compile for, the CUDA
# runtime and cuBLASLt. Before the library's target is made; ligature_cuda(<target>) then adds them.
#   in   LIGATURE_CUDA_ARCHITECTURES, as "90a" or "80;90a;100a"
set(LIGATURE_CUDA_ARCHITECTURES 90a CACHE STRING
  "GPU architectures to compile the CUDA backend for, as 80;90a")

if(NOT LIGATURE_TORCH_CUDA)
  message(FATAL_ERROR "LIGATURE_CUDA=ON needs a CUDA torch; the one in ${LIGATURE_TORCH_ROOT} is "
    "without CUDA. Name another interpreter with -DPython3_EXECUTABLE=...")
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(LIGATURE_NVCC nvcc HINTS ${CUDAToolkit_ROOT} ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(LIGATURE_NVCC)
  if(NOT LIGATURE_NVCC)
    message(FATAL_ERROR "LIGATURE_CUDA=ON needs nvcc; "
      "name it with -DCMAKE_CUDA_COMPILER=..., or the toolkit with -DCUDAToolkit_ROOT=...")
  endif()
  set(CMAKE_CUDA_COMPILER ${LIGATURE_NVCC})
endif()

# Machine code for these GPUs alone: PTX for others would be compiled at the first call.
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(architecture IN LISTS LIGATURE_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "^([0-9]+[af]?)$" "\\1-real" architecture ${architecture})
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
endforeach()
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG -lineinfo")
# The runtime library is torch's, linked by name below: a second one would keep its own books.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
# Nothing of what nvcc links with: the compiler it finds may have a libstdc++ of its own, and a second
# one in a process breaks what torch and Ligature hand to each other.
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")
find_package(CUDAToolkit REQUIRED)

# A wheel of torch brings the libraries as packages beside it; they are what runs.
cmake_path(GET LIGATURE_TORCH_ROOT PARENT_PATH packages)
file(GLOB wheel_includes ${packages}/nvidia/cu*/include ${packages}/nvidia/cublas/include)
file(GLOB wheel_libraries ${packages}/nvidia/cu*/lib ${packages}/nvidia/cublas/lib
  ${packages}/nvidia/cuda_runtime/lib)

function(ligature_find_cuda_library variable name)
  find_library(${variable} NAMES lib${name}.so.${CUDAToolkit_VERSION_MAJOR} ${name}
    HINTS ${wheel_libraries} ${CUDAToolkit_LIBRARY_DIR} NO_CMAKE_FIND_ROOT_PATH)
  mark_as_advanced(${variable})
  if(NOT ${variable})
    message(FATAL_ERROR "LIGATURE_CUDA=ON needs ${name} ${CUDAToolkit_VERSION_MAJOR}, which neither "
      "the toolkit in ${CUDAToolkit_LIBRARY_ROOT} nor the packages beside torch have; "
      "name it with -D${variable}=...")
  endif()
endfunction()

ligature_find_cuda_library(LIGATURE_CUDART cudart)
ligature_find_cuda_library(LIGATURE_CUBLASLT cublasLt)
find_path(LIGATURE_CUBLASLT_INCLUDE cublasLt.h
  HINTS ${wheel_includes} ${CUDAToolkit_INCLUDE_DIRS} NO_CMAKE_FIND_ROOT_PATH)
mark_as_advanced(LIGATURE_CUBLASLT_INCLUDE)
if(NOT LIGATURE_CUBLASLT_INCLUDE)
  message(FATAL_ERROR "LIGATURE_CUDA=ON needs cublasLt.h; "
    "name its folder with -DLIGATURE_CUBLASLT_INCLUDE=...")
endif()

function(ligature_cuda target)
  # For the torch side alone: nvcc has the headers it belongs to.
  set(includes ${LIGATURE_CUBLASLT_INCLUDE} ${wheel_includes} ${CUDAToolkit_INCLUDE_DIRS})
  list(REMOVE_DUPLICATES includes)
  foreach(include IN LISTS includes)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter \"${include}\">")
  endforeach()
  target_link_libraries(${target} PRIVATE ${LIGATURE_TORCH_ROOT}/lib/libtorch_cuda.so
    ${LIGATURE_TORCH_ROOT}/lib/libc10_cuda.so ${LIGATURE_CUBLASLT} ${LIGATURE_CUDART})
endfunction()
