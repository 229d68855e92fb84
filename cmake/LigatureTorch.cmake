# Finds Python and the torch inside it; gives the targets `torch` and `torch_python`.
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)

if(NOT LIGATURE_TORCH_ROOT OR NOT LIGATURE_TORCH_PYTHON STREQUAL Python3_EXECUTABLE)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import pathlib, torch; print(pathlib.Path(torch.__file__).parent, torch.__version__, torch.version.cuda or '', sep=';')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${Python3_EXECUTABLE} cannot import torch; "
      "name another interpreter with -DPython3_EXECUTABLE=...")
  endif()
  list(GET found 0 root)
  list(GET found 1 version)
  list(GET found 2 cuda)
  set(LIGATURE_TORCH_ROOT ${root} CACHE INTERNAL "")
  set(LIGATURE_TORCH_VERSION ${version} CACHE INTERNAL "")
  set(LIGATURE_TORCH_CUDA "${cuda}" CACHE INTERNAL "")
  set(LIGATURE_TORCH_PYTHON ${Python3_EXECUTABLE} CACHE INTERNAL "")
endif()
message(STATUS "torch ${LIGATURE_TORCH_VERSION} in ${LIGATURE_TORCH_ROOT}")

if(LIGATURE_TORCH_CUDA)
  find_package(CUDAToolkit QUIET)
endif()
if(LIGATURE_TORCH_CUDA AND NOT CUDAToolkit_FOUND)
  # A CUDA torch on a machine without the CUDA toolkit: torch's own package file would stop here,
  # although the CPU build needs only its headers and libraries.
  if(LIGATURE_CUDA)
    message(FATAL_ERROR "LIGATURE_CUDA=ON needs the CUDA toolkit; name it with -DCUDAToolkit_ROOT=...")
  endif()
  foreach(name IN ITEMS c10 torch_cpu torch)
    add_library(${name} SHARED IMPORTED)
    set_target_properties(${name} PROPERTIES
      IMPORTED_LOCATION ${LIGATURE_TORCH_ROOT}/lib/lib${name}.so IMPORTED_NO_SONAME ON)
  endforeach()
  target_include_directories(torch INTERFACE
    ${LIGATURE_TORCH_ROOT}/include ${LIGATURE_TORCH_ROOT}/include/torch/csrc/api/include)
  target_link_libraries(torch INTERFACE torch_cpu c10)
else()
  if(LIGATURE_TORCH_CUDA)
    # What torch's package file looks for, under the names it uses.
    set(CUDA_TOOLKIT_ROOT_DIR ${CUDAToolkit_LIBRARY_ROOT} CACHE PATH "")
    if(NOT TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
      set(TORCH_CUDA_ARCH_LIST 9.0a)
    endif()
  endif()
  # Torch's package file warns about a profiler library that its wheels do not ship.
  block(SCOPE_FOR VARIABLES)
  set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
  find_package(Torch REQUIRED PATHS ${LIGATURE_TORCH_ROOT}/share/cmake/Torch NO_DEFAULT_PATH)
  endblock()
endif()

add_library(torch_python SHARED IMPORTED)
set_target_properties(torch_python PROPERTIES
  IMPORTED_LOCATION ${LIGATURE_TORCH_ROOT}/lib/libtorch_python.so IMPORTED_NO_SONAME ON)
target_link_libraries(torch_python INTERFACE torch)
