// The CUDA backend's kernels of low precision, called by kernels/quantize.cpp and, for delayed
// scaling, by the recipe. Nothing here waits for the device or reads its memory.
#pragma once

#include <functional>
#include <vector>

#include "ligature/kernels/delayed.h"
#include "ligature/kernels/quantize.h"

namespace ligature::cuda {

using at::Tensor;
using kernels::ActivationBackwardQuantized;
using kernels::ActivationSpec;
using kernels::NormQuantized;
using kernels::QuantizeArgs;
using kernels::QuantizedMatrix;
using kernels::QuantizedPair;

QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args);

struct QuantizePlan;
/// A matrix [rows, columns] in low precision, on the device of `like`, that `cast` writes: it is
/// called once with a plan or, where the largest value has to be known first, twice, with
/// `find_amax` the first time.
QuantizedPair quantize_by(int64_t rows, int64_t columns, const Tensor& like,
                          const QuantizeArgs& args,
                          const std::function<void(const QuantizePlan&)>& cast);

void update_amax(const Tensor& x, Tensor& amax);
void update_amax(const QuantizedMatrix& q, const Format& format, Tensor& amax);
/// Into `out`, [rows, columns] of any dtype.
void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format);
void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format);
QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns);
Tensor hadamard(const Tensor& x, bool inverse);

// A kernel and its cast in one. Which arguments one kernel serves, the first function of each pair
// tells; for others the two kernels run after each other. The data and scales are the same bits;
// sums over rows (dbias) and columns (dscales) are added in another order than by the plain kernel.

bool fuses_norm(const Tensor& x, const Tensor& w, const Tensor& b, at::ScalarType out_dtype,
                const QuantizeArgs& args);
/// RMSNorm unless `centered`.
NormQuantized norm_forward_quantize(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                                    bool zero_centered_gamma, bool centered,
                                    const QuantizeArgs& args);

bool fuses_activation(const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
                      const QuantizeArgs& args);
QuantizedPair activation_forward_quantize(const Tensor& x, const ActivationSpec& spec,
                                          const Tensor& scales, const QuantizeArgs& args);

bool fuses_activation_backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                               const Tensor& scales, const QuantizeArgs& args);
ActivationBackwardQuantized activation_backward_quantize(const Tensor& dy, const Tensor& x,
                                                         const ActivationSpec& spec,
                                                         const Tensor& scales, bool need_dscales,
                                                         bool need_dbias, const QuantizeArgs& args);

using kernels::DelayedState;
/// Moves each amax into its history and gives the new scales, all in one kernel for up to 80
/// tensors, which are on one device. They are new tensors where nothing else is asked for, except
/// in a graph that is captured: that reads the same memory each time it runs, so there scales are
/// overwritten.
std::vector<Tensor> update_delayed(const std::vector<DelayedState>& states, int64_t margin,
                                   bool most_recent);

/// Is the current stream of the device being captured into a graph?
bool is_captured(at::Device device);
inline bool is_captured(const Tensor& x) { return is_captured(x.device()); }

}  // namespace ligature::cuda
