// What a compiled graph sees of a fuser's call: a flat list of fresh tensors. A layout says which
// of them is what: an output, something that backward will be given again, or nothing of its own
// because an argument serves as well.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ligature/fuser/backward_run.h"
#include "ligature/fuser/execute.h"

namespace ligature::compile {

/// The tensors of one traced call, all contiguous.
struct Arguments {
  Tensor input;
  std::vector<Tensor> params;
  std::vector<Tensor> extra_inputs;
};

/// Where a tensor is to be found.
struct Source {
  enum class Kind : uint8_t { None, Input, Param, Extra, Result };
  Kind kind = Kind::None;
  size_t index = 0;
  /// Not all of it, or in another shape: a view of this geometry, counted from its beginning.
  struct View {
    at::DimVector sizes;
    at::DimVector strides;
    int64_t offset = 0;
  };
  std::optional<View> view;

  bool same_tensor(const Source& other) const { return kind == other.kind && index == other.index; }
};

struct SavedSlot {
  QuantizedPtr shell;  ///< what puts the parts together; null for a plain tensor
  std::vector<Source> parts;
};

struct Layout {
  std::vector<Source> outputs;  ///< the output, then the extra outputs
  /// For each of the caller's extra inputs: the values it is overwritten with, if it is.
  std::vector<Source> overwritten;
  size_t num_outputs = 0;          ///< so many results come first that are not for backward alone
  std::vector<ValueMeta> results;  ///< what forward returns
  std::vector<Source> kept;        ///< what backward is given, in order
  std::vector<std::vector<SavedSlot>> saved;  ///< [operation][saved value]
  ForwardShapes shapes;
  std::shared_ptr<const Contexts> contexts;  ///< plain state only
  int64_t structure = 0;                     ///< equal for calls that differ in sizes only
};

/// What forward left: where it is, and what it is.
struct Outcome {
  Tensor output;
  std::vector<std::vector<Tensor>> extra_outputs;  ///< [operation]
  ForwardShapes shapes;
  std::vector<Tensor> overwritten;  ///< per extra input of the caller's
};

/// Makes the layout of a call that ran, on `device` or in its place. Takes the saved tensors out of
/// the contexts and keeps the rest of them.
std::shared_ptr<const Layout> make_layout(const Plan& plan, const Arguments& arguments,
                                          const Outcome& outcome,
                                          std::shared_ptr<Contexts> contexts, at::Device device,
                                          std::vector<Tensor>& results);
/// The results of another call of the same layout.
std::vector<Tensor> collect_results(const Layout& layout, const Plan& plan,
                                    const Arguments& arguments, const Outcome& outcome,
                                    const Contexts& contexts);

std::shared_ptr<Contexts> copy_contexts(const Contexts& contexts);

}  // namespace ligature::compile
