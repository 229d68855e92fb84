// The operations under test with what they compute with. A language binding keeps parameters in
// objects of its own, so they are given beside the operations.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ligature/fuser/wiring.h"
#include "ligature/testing/options.h"

namespace ligature::testing {

struct Subject {
  std::vector<BasicOpPtr> ops;
  std::vector<std::vector<Tensor>> params;  ///< of each operation
  std::vector<std::vector<std::string>> param_names;
  std::vector<bool> training;        ///< of each operation
  std::shared_ptr<void> keep_alive;  ///< whatever must live as long
};

/// Fresh operations with parameters of this dtype on this device.
using MakeSubject = std::function<Subject(at::ScalarType, at::Device)>;
using MakeOps = std::function<OpList(at::ScalarType, at::Device)>;

/// Operations written in C++ with their own parameters; composites are taken apart.
Subject subject_of(const OpList& ops);

/// The names of everything that may need a gradient: the input, the parameters, the caller's extra
/// inputs. An operation is numbered where its name alone would not tell.
std::vector<std::string> leaf_names(const Subject& subject, const Wiring& wiring);
/// The output, then the extra outputs that the caller gets.
std::vector<std::string> output_names(const Subject& subject, const Wiring& wiring);
/// `BasicLinear`, or `BasicLinear[1]` where there are several.
std::string op_name(const Subject& subject, size_t op);

/// The shapes with those of the extra inputs worked out; an error says which cannot be.
ExampleShapes complete_shapes(const Subject& subject, const Wiring& wiring,
                              const ExampleShapes& shapes, at::ScalarType dtype, at::Device device);

/// What is known of each extra input of an operation.
using MaybeMetas = std::vector<std::optional<ValueMeta>>;
/// A shape that the operation takes for this one: of the input, without its last dimension, or of
/// an extra input before it.
std::optional<std::vector<int64_t>> find_shape(const Subject& subject, size_t op,
                                               const ValueMeta& input, MaybeMetas extras,
                                               size_t slot);

/// "float32", or "bfloat16 with float32 parameters".
std::string to_string(const Dtypes& dtypes);
std::string to_string(const ExampleShapes& shapes);

}  // namespace ligature::testing
