#include "ligature/ops/tensor_parallel.h"

#include "ligature/check.h"

namespace ligature {

TensorParallel TensorParallelOptions::parsed() const {
  if (!mode) return TensorParallel::None;
  return *mode == "column" ? TensorParallel::Column : TensorParallel::Row;
}

TensorParallelOptions canonical(TensorParallelOptions given, const std::string& op,
                                int64_t in_features, int64_t out_features) {
  if (!given.mode) return {};
  LIGATURE_CHECK(*given.mode == "column" || *given.mode == "row", "[", op,
                 "] tensor_parallel_mode must be None, 'column' or 'row', got '", *given.mode, "'");
  if (!given.size) given.size = distributed::find_group(given.group)->size();
  LIGATURE_CHECK(*given.size > 0, "[", op, "] tensor_parallel_size must be positive, got ",
                 *given.size);
  if (*given.size == 1) return {};
  const bool column = *given.mode == "column";
  LIGATURE_CHECK((column ? out_features : in_features) % *given.size == 0, "[", op,
                 "] tensor_parallel_mode='", *given.mode, "' needs ",
                 column ? "out_features" : "in_features", " that ", *given.size,
                 " ranks can share evenly, got ", column ? out_features : in_features);
  return given;
}

distributed::GroupPtr group_of(const TensorParallelOptions& options, const std::string& op) {
  distributed::GroupPtr group = distributed::find_group(options.group);
  LIGATURE_CHECK_STATE(group->size() == options.ranks(), "[", op, "] it was made for a group of ",
                       options.ranks(), " ranks, and ",
                       group->name().empty()
                           ? "there is no group now"
                           : "group '" + group->name() + "' has " + std::to_string(group->size()));
  return group;
}

}  // namespace ligature
