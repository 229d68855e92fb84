"""Written by the build: what ligature._C was compiled for, and where its CMake package is."""

torch_version: str
cmake_dir: str  # relative to the package in a wheel, the build tree otherwise
