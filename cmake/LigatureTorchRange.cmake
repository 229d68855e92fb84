# Compares LIGATURE_TORCH_VERSION with the range of torch versions, which stands in pyproject.toml.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml range REGEX "torch>=[0-9.]+,<[0-9.]+")
string(REGEX MATCH "torch>=([0-9.]+),<([0-9.]+)" range "${range}")
set(message "Ligature supports ${range}; got torch ${LIGATURE_TORCH_VERSION} ${LIGATURE_TORCH_ROOT}")
if(LIGATURE_TORCH_VERSION VERSION_LESS CMAKE_MATCH_1)
  message(FATAL_ERROR "${message}")
elseif(LIGATURE_TORCH_VERSION VERSION_GREATER_EQUAL CMAKE_MATCH_2)
  message(WARNING "${message}")
endif()
