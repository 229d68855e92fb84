# Finds torch and gives the target `torch`. Ligature's own build uses it, and it is installed beside
# LigatureConfig.cmake for every project that uses Ligature.
#   in   LIGATURE_TORCH_HINTS: folders of torch, or prefixes that hold it; without one, Python is asked
#   out  LIGATURE_TORCH_ROOT, LIGATURE_TORCH_VERSION, LIGATURE_TORCH_CUDA (is it a CUDA torch?);
#        LIGATURE_TORCH_ERROR, not empty when there is no torch
set(LIGATURE_TORCH_ERROR "")
set(LIGATURE_TORCH_PACKAGE LIGATURE_TORCH_PACKAGE-NOTFOUND)

if(TARGET torch AND Torch_DIR)
  set(LIGATURE_TORCH_PACKAGE ${Torch_DIR})
elseif(LIGATURE_TORCH_HINTS)
  find_path(LIGATURE_TORCH_PACKAGE TorchConfig.cmake NO_CACHE NO_DEFAULT_PATH
    PATHS ${LIGATURE_TORCH_HINTS} PATH_SUFFIXES share/cmake/Torch Torch)
endif()

if(NOT LIGATURE_TORCH_PACKAGE)
  if(NOT Python3_Interpreter_FOUND)
    find_package(Python3 QUIET COMPONENTS Interpreter)
  endif()
  set(root "")
  if(Python3_Interpreter_FOUND)
    # Torch is not imported: that takes seconds, and this runs on every configure.
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake")
    set(LIGATURE_TORCH_PACKAGE ${root}/share/cmake/Torch)
  elseif(Python3_Interpreter_FOUND)
    set(LIGATURE_TORCH_ERROR
      "${Python3_EXECUTABLE} has no torch; name another interpreter with -DPython3_EXECUTABLE=...")
  else()
    set(LIGATURE_TORCH_ERROR
      "there is no Python to ask for torch; name one with -DPython3_EXECUTABLE=...")
  endif()
endif()

if(LIGATURE_TORCH_PACKAGE)
  cmake_path(SET LIGATURE_TORCH_ROOT NORMALIZE ${LIGATURE_TORCH_PACKAGE}/../../..)
  string(REGEX REPLACE "/$" "" LIGATURE_TORCH_ROOT ${LIGATURE_TORCH_ROOT})
  block(PROPAGATE LIGATURE_TORCH_VERSION)
    include(${LIGATURE_TORCH_PACKAGE}/TorchConfigVersion.cmake)
    set(LIGATURE_TORCH_VERSION ${PACKAGE_VERSION})
  endblock()
  set(LIGATURE_TORCH_CUDA OFF)
  if(EXISTS ${LIGATURE_TORCH_ROOT}/lib/libtorch_cuda.so)
    set(LIGATURE_TORCH_CUDA ON)
    find_package(CUDAToolkit QUIET)
  endif()
  message(STATUS "torch ${LIGATURE_TORCH_VERSION} in ${LIGATURE_TORCH_ROOT}")
endif()

if(TARGET torch OR NOT LIGATURE_TORCH_PACKAGE)
elseif(LIGATURE_TORCH_CUDA AND (LIGATURE_CUDA OR NOT CUDAToolkit_FOUND))
  # A CUDA torch on a machine without the CUDA toolkit: torch's own package file would stop here,
  # although code without kernels of its own needs only the headers and libraries. Nothing refers to
  # libtorch_cuda; it registers itself when it is loaded. With the CUDA backend the same will do, and
  # torch's package file does not choose the architectures and flags of our kernels.
  foreach(name IN ITEMS c10 torch_cpu torch_cuda torch)
    add_library(${name} SHARED IMPORTED)
    set_target_properties(${name} PROPERTIES
      IMPORTED_LOCATION ${LIGATURE_TORCH_ROOT}/lib/lib${name}.so IMPORTED_NO_SONAME ON)
  endforeach()
  target_include_directories(torch INTERFACE
    ${LIGATURE_TORCH_ROOT}/include ${LIGATURE_TORCH_ROOT}/include/torch/csrc/api/include)
  target_link_libraries(torch INTERFACE torch_cpu c10
    "-Wl,--push-state,--no-as-needed,$<TARGET_FILE:torch_cuda>,--pop-state")
else()
  if(LIGATURE_TORCH_CUDA)
    # What torch's package file looks for, under the name it uses.
    set(CUDA_TOOLKIT_ROOT_DIR ${CUDAToolkit_LIBRARY_ROOT} CACHE PATH "")
  endif()
  if(Torch_DIR AND NOT Torch_DIR STREQUAL LIGATURE_TORCH_PACKAGE)
    # Torch has moved; these are the places that its package file keeps.
    unset(TORCH_LIBRARY CACHE)
    unset(c10_LIBRARY CACHE)
    unset(kineto_LIBRARY CACHE)
    unset(C10_CUDA_LIBRARY CACHE)
  endif()
  set(Torch_DIR ${LIGATURE_TORCH_PACKAGE} CACHE PATH "" FORCE)
  block(SCOPE_FOR VARIABLES)
    # Torch's package file warns about a profiler library that its wheels do not ship.
    set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
    find_package(Torch)
  endblock()
  if(NOT TARGET torch)
    set(LIGATURE_TORCH_ERROR "the package file of torch in ${LIGATURE_TORCH_ROOT} gave no torch")
  endif()
endif()
