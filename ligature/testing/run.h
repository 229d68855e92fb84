// One forward of the operations with its graph alive, and gradients taken of it. What is checked
// and what it is compared with are both such forwards: of a plan, or of a formula.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ligature/fuser/execute.h"
#include "ligature/testing/patterns.h"
#include "ligature/testing/subject.h"

namespace ligature::testing {

/// The values of one case.
struct Data {
  Tensor input;
  std::vector<Tensor> extra_inputs;
  std::vector<Tensor> grad_outputs;  ///< of the output and of each extra output
};

struct Graph {
  std::vector<Tensor> leaves;  ///< what gradients are taken of, in the order of leaf_names
  std::vector<Tensor> given;   ///< the same as the operations saw them
  std::vector<Tensor> outputs;
};

using Forward = std::function<Graph(const Data&, const Needs&)>;

/// Gradients of the wanted leaves, through the chosen outputs; undefined where there is none.
struct Gradients {
  std::vector<Tensor> of_leaves;
  std::vector<bool> changed;  ///< was this gradient of an output overwritten?
};
Gradients gradients(const Graph& graph, const Data& data, const Needs& wanted,
                    bool keep_graph = false, const Needs& outputs = ~Needs());

/// Plans of the operations by what runs in backward: unfused, or with one fusion in its pass, as
/// the fuser would make them.
class Plans {
 public:
  Plans(const Subject& subject, PlanOptions options);
  Plans(const Subject& subject, PlanOptions options, const Fusion& fusion, Pass pass);

  /// Null where the fusion leaves the operations as they are.
  std::shared_ptr<const Plan> get(size_t first_backward_op);
  /// Why it does.
  const std::string& reason() const { return reason_; }
  const Wiring& wiring() const { return *wiring_; }

 private:
  OpList fuse(const OpList& ops, const PlanOptions& options);

  const Subject& subject_;
  PlanOptions options_;
  const Fusion* fusion_ = nullptr;
  Pass pass_ = Pass::Forward;
  std::shared_ptr<const Wiring> wiring_;
  std::map<size_t, std::shared_ptr<const Plan>> plans_;
  std::string reason_;
};

/// A call with copies of the data, flags set as they are needed, and the tensors in it.
struct Prepared {
  Call call;
  Graph graph;  ///< without outputs
};
Prepared prepare_call(const Subject& subject, const Wiring& wiring, const Data& data,
                      const Needs& needs);

/// Runs a plan by the fuser's own executor. The random numbers of operations begin at `seed`.
Graph run_plan(Plans& plans, const Subject& subject, const Data& data, const Needs& needs,
               uint64_t seed);

/// Starts torch's random numbers of this device at `seed`.
void seed_device(at::Device device, uint64_t seed);

/// Puts torch's random numbers back to where they were.
class KeepRandomState {
 public:
  explicit KeepRandomState(at::Device device);
  ~KeepRandomState();
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  std::vector<std::pair<at::Device, Tensor>> states_;
};

}  // namespace ligature::testing
