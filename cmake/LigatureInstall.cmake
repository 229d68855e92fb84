# What is installed: the library, its public headers and a CMake package. A wheel has the same
# layout, with the Python package as the prefix. No installed file holds a path of this machine. The
# build tree is such a package too.
include(CMakePackageConfigHelpers)

set(package_dir share/cmake/Ligature)
set_target_properties(ligature PROPERTIES INSTALL_RPATH "$ORIGIN")
if(DEFINED SKBUILD)
  # Python has loaded torch's libraries before ours; a C++ program finds them beside the package.
  set(rpath "$ORIGIN;$ORIGIN/../../torch/lib")
  if(LIGATURE_CUDA)
    list(APPEND rpath "$ORIGIN/../../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/lib")
  endif()
  set_target_properties(ligature PROPERTIES INSTALL_RPATH "${rpath}")
else()
  install(FILES LICENSE DESTINATION share/licenses/ligature)
endif()

install(TARGETS ligature EXPORT LigatureTargets LIBRARY DESTINATION lib INCLUDES DESTINATION include)
# The headers that users need, and those that these include.
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/check_includes.py --installed
  OUTPUT_VARIABLE public_headers OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" public_headers "${public_headers}")
foreach(header IN LISTS public_headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ligature/${header} DESTINATION include/ligature/${folder})
endforeach()
install(EXPORT LigatureTargets NAMESPACE Ligature:: DESTINATION ${package_dir})

configure_package_config_file(cmake/LigatureConfig.cmake.in LigatureConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(LigatureConfigVersion.cmake COMPATIBILITY SameMinorVersion)
export(EXPORT LigatureTargets NAMESPACE Ligature:: FILE LigatureTargets.cmake)
configure_file(cmake/LigatureTorch.cmake LigatureTorch.cmake COPYONLY)
install(FILES ${PROJECT_BINARY_DIR}/LigatureConfig.cmake
  ${PROJECT_BINARY_DIR}/LigatureConfigVersion.cmake cmake/LigatureTorch.cmake
  DESTINATION ${package_dir})
