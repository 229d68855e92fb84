// How a linear layer is spread over the ranks of a group. Its sizes are those of the whole layer;
// each rank has a part of the weight.
#pragma once

#include <optional>
#include <string>

#include "ligature/distributed/group.h"
#include "ligature/options.h"

namespace ligature {

enum class TensorParallel : uint8_t {
  None,
  Column,  ///< a rank has some of the output's features
  Row,     ///< a rank has some of the input's features, so outputs are added up
};

struct TensorParallelOptions {
  std::optional<std::string> mode;   ///< "column" or "row"
  std::optional<std::string> group;  ///< its name; none: torch's default group
  /// Tokens, the first dimension, are spread too wherever the features are not.
  bool sequence_parallel = false;
  /// Of the group; none: it is asked when the operation is made.
  std::optional<int64_t> size;

  template <class F>
  void fields(F&& f) {
    f("tensor_parallel_mode", mode);
    f("tensor_parallel_group", group);
    f("sequence_parallel", sequence_parallel);
    f("tensor_parallel_size", size);
  }

  TensorParallel parsed() const;
  int64_t ranks() const { return size.value_or(1); }
};

/// In its canonical form: a group of one rank splits nothing. Refuses sizes that the ranks cannot
/// share evenly. `op`: for errors.
TensorParallelOptions canonical(TensorParallelOptions given, const std::string& op,
                                int64_t in_features, int64_t out_features);

/// The group, which has the size that the operation was made for.
distributed::GroupPtr group_of(const TensorParallelOptions& options, const std::string& op);

}  // namespace ligature
