#include "ligature/fuser/only_where_faster.h"

#include <sstream>

#include "ligature/kernels/backend.h"
#include "ligature/quantized/quantized_tensor.h"

namespace ligature {
namespace {

// Multiplications of one linear operation, forward: below it a step waits for the host, which has
// more to do in low precision (docs/performance.md: slower at 0.9e10, faster at 7e10).
constexpr double kFasterFrom = 2e10;

struct Work {
  double multiplications = 0;
  int linears = 0;
  bool emulated = false;
};

Work work_of(const Call& call, const std::vector<BasicOpPtr>& ops, at::Device device) {
  Work work;
  const at::IntArrayRef sizes = call.input.sizes();
  const double rows = static_cast<double>(c10::multiply_integers(sizes.begin(), sizes.end() - 1));
  for (size_t i = 0; i < ops.size(); ++i) {
    const OpQuantizationPtr state = ops[i]->quantization(call.autocast.active(), device);
    const Quantizer* quantizer = state != nullptr ? state->forward_quantizer(0) : nullptr;
    if (quantizer == nullptr || call.param_offsets[i] == call.param_offsets[i + 1]) continue;
    const Tensor& weight = call.params[call.param_offsets[i]];
    if (!weight.defined() || weight.dim() != 2) continue;
    ++work.linears;
    work.multiplications += rows * static_cast<double>(weight.numel());
    work.emulated = work.emulated || !kernels::has_quantized_gemm(quantizer->format_tag(), device);
  }
  return work;
}

}  // namespace

std::string why_high_precision(const Call& call, const std::vector<BasicOpPtr>& ops,
                               at::Device device) {
  const AutocastState& autocast = call.autocast;
  if (!autocast.only_where_faster || !autocast.enabled || autocast.recipe == nullptr) return "";
  // What is there in low precision already is not turned back.
  if (call.input.is_quantized() || call.input.sizes().empty()) return "";
  for (const Tensor& parameter : call.params) {
    if (parameter.defined() && quantized_of(parameter) != nullptr) return "";
  }
  const Work work = work_of(call, ops, device);
  if (work.linears == 0) return "";
  const std::string begin = autocast.recipe->name() + " not used (only_where_faster=True): ";
  if (work.emulated) return begin + "this device has no such products";
  if (kernels::is_captured(device)) return "";  // a graph waits for no host
  const double mean = work.multiplications / work.linears;
  if (mean >= kFasterFrom) return "";
  std::ostringstream out;
  out.precision(2);
  out << begin << "a linear operation has " << mean << " multiplications here, and pays from "
      << kFasterFrom << " on";
  return out.str();
}

}  // namespace ligature
