// Where every extra input of a run of operations comes from and where every extra output goes:
// the caller, or a named channel inside the run.
#pragma once

#include <string>
#include <vector>

#include "ligature/operation.h"

namespace ligature {

struct Wiring {
  static constexpr size_t kNone = static_cast<size_t>(-1);

  struct Input {
    size_t caller = kNone;    ///< index among the caller's extra inputs, or ...
    size_t producer = kNone;  ///< ... the operation and ...
    size_t output = kNone;    ///< ... its extra output that feeds the channel
  };
  struct Output {
    size_t caller = kNone;  ///< index among the extra outputs returned
  };

  std::vector<std::vector<Input>> inputs;    // [operation][slot]
  std::vector<std::vector<Output>> outputs;  // [operation][slot]
  /// Channel that an extra input or output of the caller's belongs to; empty without one.
  std::vector<std::string> caller_inputs;
  std::vector<std::string> caller_outputs;
  /// Was the output asked for by the user, or only by a run that continues this one?
  std::vector<bool> output_to_user;

  /// Are there extra inputs or outputs, the caller's or on channels?
  bool has_extras() const;
};

/// `open_channels`: channels that cross the ends of this run. Their missing producers are extra
/// inputs of the caller's, their outputs are returned too. Any other missing producer is an error.
Wiring wire(const std::vector<BasicOpPtr>& ops, const std::vector<std::string>& open_channels = {});

/// "AddExtraInput (operation 3)"
std::string place(const std::vector<BasicOpPtr>& ops, size_t i);

/// All slots are the caller's: for an operation that is called alone.
Wiring wire_without_channels(const std::vector<BasicOpPtr>& ops);

}  // namespace ligature
