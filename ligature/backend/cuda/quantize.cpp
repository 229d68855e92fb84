// The torch side of low precision: memory, the order of launches, and which arguments a kernel that
// quantizes its own result serves.
#include "ligature/backend/cuda/quantize.h"

#include <ATen/cuda/EmptyTensor.h>

#include <cmath>

#include "ligature/backend/cuda/activation.h"
#include "ligature/backend/cuda/gemm_tensor.h"
#include "ligature/backend/cuda/generator.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/backend/cuda/launch_scope.h"
#include "ligature/backend/cuda/norm.h"
#include "ligature/backend/cuda/quantize_launch.h"
#include "ligature/backend/cuda/sums_launch.h"
#include "ligature/backend/cuda/workspace.h"
#include "ligature/kernels/quantized_shapes.h"

namespace ligature::cuda {
namespace {

using shapes::MatrixShape;

constexpr int64_t kTile = 128;
// By how much a cast in a graph moves the generator's offset on, the least there is:
// device/draws.cuh.
constexpr uint64_t kRoundingDraws = 4;

bool is_aligned(const Tensor& x, uintptr_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % bytes == 0;
}

/// As shapes::empty_matrix; but scales of lines of 128 lie column after column, as products read
/// them.
QuantizedMatrix empty_matrix(MatrixShape shape, const Format& format, at::Device device,
                             bool own_scale) {
  const auto blocks = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const bool fp4 = format.element == Element::E2M1;
  const int64_t size = format.block_size();
  QuantizedMatrix q;
  q.data =
      small_on({shape.rows, fp4 ? blocks(shape.columns, 2) : shape.columns}, at::kByte, device);
  if (!own_scale) return q;
  if (format.per_tensor()) {
    q.scale = small_on({1}, at::kFloat, device);
  } else if (format.block_2d) {
    q.scale = small_on({blocks(shape.rows, size), blocks(shape.columns, size)},
                       format.scaling == Scaling::Block ? at::kFloat : at::kByte, device);
  } else if (format.scaling == Scaling::Block) {
    const at::DimVector sizes{shape.rows, blocks(shape.columns, size)}, strides{1, shape.rows};
    q.scale = take_small(sizes, strides, at::kFloat, device);
    if (!q.scale.defined()) {
      q.scale = Tensor(at::detail::empty_strided_cuda(sizes, strides, at::kFloat, device));
    }
    hold_memory(q.scale);
  } else {
    q.scale = small_on({shape.rows, blocks(shape.columns, size)}, at::kByte, device);
  }
  if (format.scaling == Scaling::NV) {
    q.amax = small_on({format.row_scaled ? shape.rows : 1}, at::kFloat, device);
  }
  return q;
}

/// Both orientations, as shapes::empty_pair.
QuantizedPair empty_pair(MatrixShape shape, const QuantizeArgs& args, at::Device device) {
  const Format& format = args.format;
  QuantizedPair pair;
  if (args.rowwise) pair.rowwise = empty_matrix(shape, format, device, true);
  if (!args.columnwise) return pair;
  const bool shared = args.rowwise && format.per_tensor();
  const int64_t columns = format.hadamard ? (shape.rows + 15) / 16 * 16 : shape.rows;
  pair.columnwise = empty_matrix({shape.columns, columns}, format, device, !shared);
  if (shared) pair.columnwise.scale = pair.rowwise.scale;
  if (args.rowwise && !format.hadamard && !format.row_scaled) {
    pair.columnwise.amax = pair.rowwise.amax;
  }
  return pair;
}

QuantizeOutput output_of(const QuantizedMatrix& q, MatrixShape shape, const Format& format) {
  QuantizeOutput out;
  if (!q.defined()) return out;
  const int64_t bytes = format.element == Element::E2M1 ? 8 : 16;
  out.data = q.data.mutable_data_ptr<uint8_t>();
  out.scale = q.scale.mutable_data_ptr();
  out.amax = q.amax.defined() ? q.amax.mutable_data_ptr<float>() : nullptr;
  out.rows = shape.rows;
  out.columns = shape.columns;
  out.stride = q.data.size(1);
  if (q.scale.dim() == 2) {
    out.scale_stride = q.scale.stride(0);
    out.scale_step = q.scale.stride(1);
  }
  out.vectors = out.stride % bytes == 0 && is_aligned(q.data, static_cast<uintptr_t>(bytes));
  return out;
}

void launch_clear(void* memory, size_t bytes, Stream stream) {
  C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream));
}

void clear(const Tensor& t, Stream stream) {
  if (t.numel() > 0) launch<&launch_clear>("clear", stream, t.mutable_data_ptr(), t.nbytes());
}

/// The largest magnitudes that NV's factors come from, shared with other processes.
template <typename Cast>
void find_nv_amax(QuantizedPair& out, QuantizePlan& plan, const QuantizeArgs& args,
                  const Cast& cast_with, Stream stream) {
  const bool shared =
      args.rowwise && args.columnwise && !args.format.hadamard && !args.format.row_scaled;
  if (args.rowwise) clear(out.rowwise.amax, stream);
  if (args.columnwise && !shared) clear(out.columnwise.amax, stream);
  plan.find_amax = true;
  cast_with(plan);
  plan.find_amax = false;
  if (!args.reduce_amax) return;
  const LaunchPause pause;  // it waits for what was found
  if (args.rowwise) args.reduce_amax(out.rowwise.amax);
  if (shared) out.columnwise.amax = out.rowwise.amax;
  if (args.columnwise && !shared) args.reduce_amax(out.columnwise.amax);
  if (args.rowwise) plan.rowwise.amax = out.rowwise.amax.mutable_data_ptr<float>();
  if (args.columnwise) plan.columnwise.amax = out.columnwise.amax.mutable_data_ptr<float>();
}

/// `cast_with` is called with a plan once, or twice where the largest value has to be known first.
template <typename Cast>
QuantizedPair run(MatrixShape shape, const Tensor& like, const QuantizeArgs& args,
                  const Cast& cast_with) {
  const Stream stream = stream_of(like);
  QuantizedPair out = empty_pair(shape, args, like.device());
  QuantizePlan plan;
  plan.format = args.format;
  plan.rows = shape.rows;
  plan.columns = shape.columns;
  plan.rowwise = output_of(out.rowwise, shape, args.format);
  const int64_t filled = args.format.hadamard ? (shape.rows + 15) / 16 * 16 : shape.rows;
  plan.columnwise = output_of(out.columnwise, {shape.columns, filled}, args.format);
  plan.seed = args.seed;
  plan.offset = args.offset;
  if (args.format.stochastic_rounding && is_capturing(stream)) {
    plan.generator = draw(like.device(), kRoundingDraws);
  }
  if (args.fit_to > 0) {  // a scale of its own: the bits are those of Current
    plan.format.scaling = Scaling::Current;
    plan.fit_to = args.fit_to;
  }
  Tensor amax;
  switch (plan.format.scaling) {
    case Scaling::Delayed:
      plan.factor = args.scale.const_data_ptr<float>();
      if (args.amax.defined()) plan.amax = args.amax.mutable_data_ptr<float>();
      break;
    case Scaling::Current:
      amax = small_on({1}, at::kFloat, like.device());
      plan.amax = amax.mutable_data_ptr<float>();
      clear(amax, stream);
      plan.find_amax = true;
      cast_with(plan);
      plan.find_amax = false;
      if (args.reduce_amax) {
        const LaunchPause pause;  // it waits for what was found
        args.reduce_amax(amax);
      }
      plan.amax = amax.mutable_data_ptr<float>();
      break;
    case Scaling::NV:
      find_nv_amax(out, plan, args, cast_with, stream);
      break;
    default:
      break;
  }
  cast_with(plan);
  return out;
}

bool is_half(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

/// Can rows of so many values be read 16 bytes at a time?
bool reads_vectors(const Tensor& x, int64_t columns) {
  return x.is_contiguous() && is_aligned(x) && columns % (16 / x.element_size()) == 0;
}

bool serves_parameter(const Tensor& w) {
  return !w.defined() || (computes_in(w.scalar_type()) && w.is_contiguous() && is_aligned(w));
}

bool serves_scales(const Tensor& scales) {
  return !scales.defined() || (computes_in(scales.scalar_type()) && scales.is_contiguous());
}

/// Are tiles cast from registers, as norms are?
bool casts_tiles(int64_t rows, const Format& format) {
  return rows <= 65535 * kTile && !(format.scaling == Scaling::MX && format.block_2d);
}

ActivationSource source_of(const Tensor& x, const ActivationSpec& spec, const Tensor& scales) {
  ActivationSource source{};
  source.kind = spec.kind;
  source.params = params_of(spec);
  source.x = x.const_data_ptr();
  source.scales = data_of(scales);
  source.scales_type = scales.defined() ? type_of(scales) : Type::Float32;
  return source;
}

void launch_update_amax(const void* x, Type type, int64_t n, float* amax, Stream stream) {
  launch_amax(x, type, n, amax, stream);
}

void decode(const Tensor& out, const QuantizedMatrix& q, const Format& format, bool operand) {
  const DeviceGuard guard(out.device());
  if (!computes_in(out.scalar_type())) {
    const Tensor values = empty_on(out.sizes(), at::kFloat, out.device());
    decode(values, q, format, operand);
    out.copy_(values);
    return;
  }
  DecodePlan plan{};
  plan.format = format;
  plan.data = q.data.const_data_ptr<uint8_t>();
  plan.scale = q.scale.const_data_ptr();
  plan.amax = q.amax.defined() ? q.amax.const_data_ptr<float>() : nullptr;
  plan.rows = out.size(0);
  plan.columns = out.size(1);
  const bool matrix = q.scale.dim() == 2;
  plan.scale_stride = matrix ? q.scale.stride(0) : 0;
  plan.scale_step = matrix ? q.scale.stride(1) : 0;
  plan.operand = operand;
  launch<&launch_decode>(operand ? "expand" : "dequantize", stream_of(out), plan,
                         out.mutable_data_ptr(), type_of(out));
}

/// all.narrow(0, i, 1), without the way through the dispatcher.
Tensor entry_of(const Tensor& all, int64_t i) {
  auto one = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(all.storage()), all.key_set(), all.dtype());
  one->set_sizes_contiguous({1});
  one->set_storage_offset(i);
  return Tensor(std::move(one));
}

}  // namespace

QuantizedPair quantize(const Tensor& x, const QuantizeArgs& args) {
  const DeviceGuard guard(x.device());
  const Tensor values = x.scalar_type() == at::kDouble ? x.to(at::kFloat) : x;
  return run(shapes::matrix_shape(x.sizes()), values, args, [&](const QuantizePlan& plan) {
    launch<&launch_quantize>("quantize", stream_of(values), values.const_data_ptr(),
                             type_of(values), plan);
  });
}

QuantizedPair quantize_by(int64_t rows, int64_t columns, const Tensor& like,
                          const QuantizeArgs& args,
                          const std::function<void(const QuantizePlan&)>& cast) {
  return run({rows, columns}, like, args, cast);
}

void update_amax(const Tensor& x, Tensor& amax) {
  const DeviceGuard guard(x.device());
  const Tensor values = x.scalar_type() == at::kDouble ? x.to(at::kFloat) : x;
  launch<&launch_update_amax>("update_amax", stream_of(values), values.const_data_ptr(),
                              type_of(values), values.numel(), amax.mutable_data_ptr<float>());
}

void update_amax(const QuantizedMatrix& q, const Format& format, Tensor& amax) {
  const DeviceGuard guard(q.data.device());
  launch<&launch_code_amax>("update_amax", stream_of(q.data), q.data.const_data_ptr<uint8_t>(),
                            q.data.numel(), format.element, q.scale.const_data_ptr<float>(),
                            amax.mutable_data_ptr<float>());
}

void dequantize(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, q, format, false);
}

void expand(const Tensor& out, const QuantizedMatrix& q, const Format& format) {
  decode(out, q, format, true);
}

QuantizedMatrix transpose(const QuantizedMatrix& q, const Format& format, int64_t columns) {
  const DeviceGuard guard(q.data.device());
  QuantizedMatrix result;
  const int64_t rows = q.data.size(0);
  const bool fp4 = format.element == Element::E2M1;
  result.data = small_on({columns, fp4 ? (rows + 1) / 2 : rows}, at::kByte, q.data.device());
  result.amax = q.amax;
  result.scale = format.per_tensor() ? q.scale : q.scale.t().contiguous();
  launch<&launch_transpose_codes>("transpose", stream_of(q.data), q.data.const_data_ptr<uint8_t>(),
                                  rows, columns, fp4, result.data.mutable_data_ptr<uint8_t>());
  return result;
}

Tensor hadamard(const Tensor& x, bool inverse) {
  if (x.scalar_type() == at::kDouble) return hadamard(x.to(at::kFloat), inverse).to(at::kDouble);
  const DeviceGuard guard(x.device());
  Tensor y = shapes::hadamard(x);
  const MatrixShape shape = shapes::matrix_shape(x.sizes());
  launch<&launch_hadamard>("hadamard", stream_of(x), x.const_data_ptr(), type_of(x), shape.rows,
                           shape.columns, inverse, y.mutable_data_ptr());
  return y;
}

bool fuses_norm(const Tensor& x, const Tensor& w, const Tensor& b, at::ScalarType out_dtype,
                const QuantizeArgs& args) {
  return args.format.scaling != Scaling::NV && x.numel() > 0 && is_half(x) &&
         out_dtype == x.scalar_type() && w.numel() == x.size(-1) && reads_vectors(x, x.size(-1)) &&
         serves_parameter(w) && serves_parameter(b) &&
         casts_tiles(shapes::matrix_shape(x.sizes()).rows, args.format);
}

NormQuantized norm_forward_quantize(const Tensor& x, const Tensor& w, const Tensor& b, double eps,
                                    bool zero_centered_gamma, bool centered,
                                    const QuantizeArgs& args) {
  const DeviceGuard guard(x.device());
  const MatrixShape shape = shapes::matrix_shape(x.sizes());
  const kernels::NormForward statistics = norm_statistics(x, shape.columns, eps, centered);
  NormSource source{};
  source.x = x.const_data_ptr();
  source.mean = centered ? statistics.mean.const_data_ptr<float>() : nullptr;
  source.rstd = statistics.rstd.const_data_ptr<float>();
  source.w = w.const_data_ptr();
  source.b = data_of(b);
  source.w_type = type_of(w);
  source.b_type = b.defined() ? type_of(b) : Type::Float32;
  source.zero_centered_gamma = zero_centered_gamma;
  QuantizedPair y = run(shape, x, args, [&](const QuantizePlan& plan) {
    launch<&launch_quantize_norm>("norm_forward_quantize", stream_of(x), source, type_of(x), plan);
  });
  return {std::move(y), statistics.mean, statistics.rstd};
}

bool fuses_activation(const Tensor& x, const ActivationSpec& spec, const Tensor& scales,
                      const QuantizeArgs& args) {
  if (args.format.scaling == Scaling::NV || x.numel() == 0 || !is_half(x)) return false;
  const bool gated = kernels::is_gated(spec.kind);
  return (!gated || spec.glu_interleave_size == 0) &&
         reads_vectors(x, gated ? x.size(-1) / 2 : x.size(-1)) && serves_scales(scales);
}

QuantizedPair activation_forward_quantize(const Tensor& x, const ActivationSpec& spec,
                                          const Tensor& scales, const QuantizeArgs& args) {
  const DeviceGuard guard(x.device());
  MatrixShape shape = shapes::matrix_shape(x.sizes());
  if (kernels::is_gated(spec.kind)) shape.columns /= 2;
  const ActivationSource source = source_of(x, spec, scales);
  return run(shape, x, args, [&](const QuantizePlan& plan) {
    launch<&launch_quantize_activation>("activation_forward_quantize", stream_of(x), source,
                                        type_of(x), plan);
  });
}

bool fuses_activation_backward(const Tensor& dy, const Tensor& x, const ActivationSpec& spec,
                               const Tensor& scales, const QuantizeArgs& args) {
  const bool gated = kernels::is_gated(spec.kind);
  const int64_t units = gated ? x.size(-1) / 2 : x.size(-1);
  return fuses_activation(x, spec, scales, args) && dy.scalar_type() == x.scalar_type() &&
         reads_vectors(dy, units) && (!gated || units % kTile == 0);
}

ActivationBackwardQuantized activation_backward_quantize(const Tensor& dy, const Tensor& x,
                                                         const ActivationSpec& spec,
                                                         const Tensor& scales, bool need_dscales,
                                                         bool need_dbias,
                                                         const QuantizeArgs& args) {
  const DeviceGuard guard(x.device());
  const MatrixShape shape = shapes::matrix_shape(x.sizes());
  const int64_t units = kernels::is_gated(spec.kind) ? shape.columns / 2 : shape.columns;
  const int64_t down = (shape.rows + kTile - 1) / kTile, across = (units + kTile - 1) / kTile;
  ActivationSource source = source_of(x, spec, scales);
  source.dy = dy.const_data_ptr();
  Tensor dbias_sums, dscales_sums;
  if (need_dbias) dbias_sums = small_on({down, shape.columns}, at::kFloat, x.device());
  if (need_dscales) dscales_sums = small_on({shape.rows, across}, at::kFloat, x.device());
  source.dbias = static_cast<float*>(mutable_data_of(dbias_sums));
  source.dscales = static_cast<float*>(mutable_data_of(dscales_sums));
  ActivationBackwardQuantized result;
  constexpr const char* kName = "activation_backward_quantize";
  const Stream stream = stream_of(x);
  result.dx = run(shape, x, args, [&](const QuantizePlan& plan) {
    launch<&launch_quantize_activation_backward>(kName, stream, source, type_of(x), plan);
  });
  if (need_dbias) {
    result.dbias = empty_on({shape.columns}, x.scalar_type(), x.device());
    const PartialSums dbias{source.dbias, result.dbias.mutable_data_ptr(), type_of(x)};
    launch<&launch_sum_partials>(kName, stream, dbias, PartialSums{}, down, shape.columns);
  }
  if (need_dscales) {
    result.dscales = empty_as(scales);
    const PartialSums dscales{source.dscales, result.dscales.mutable_data_ptr(),
                              type_of(result.dscales)};
    launch<&launch_sum_row_partials>(kName, stream, dscales, shape.rows, across);
  }
  return result;
}

std::vector<Tensor> update_delayed(const std::vector<DelayedState>& states, int64_t margin,
                                   bool most_recent) {
  std::vector<Tensor> scales;
  if (states.empty()) return scales;
  const Tensor& any = states.front().amax;
  const DeviceGuard guard(any.device());
  const int64_t n = static_cast<int64_t>(states.size());
  const bool captured = is_captured(any);
  Tensor made;
  scales.reserve(states.size());
  for (int64_t i = 0; i < n; ++i) {
    const DelayedState& s = states[static_cast<size_t>(i)];
    const bool in_place = captured || s.overwrite;
    if (!in_place && !made.defined()) made = empty_on({n}, at::kFloat, any.device());
    scales.push_back(in_place ? s.scale : entry_of(made, i));
  }
  for (int64_t first = 0; first < n; first += kDelayedEntries) {
    const int64_t count = std::min<int64_t>(kDelayedEntries, n - first);
    DelayedUpdate update{};
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(first + i);
      const DelayedState& s = states[at];
      update.entries[i] = {s.history.mutable_data_ptr<float>(),
                           s.amax.mutable_data_ptr<float>(),
                           s.scale.const_data_ptr<float>(),
                           scales[at].mutable_data_ptr<float>(),
                           static_cast<const float*>(data_of(s.noted)),
                           static_cast<int32_t>(s.history.numel()),
                           s.max_value};
    }
    update.divisor = std::ldexp(1.0f, static_cast<int>(margin));
    update.most_recent = most_recent;
    launch<&launch_delayed_update>("update_delayed", stream_of(any), update,
                                   static_cast<int>(count));
  }
  return scales;
}

bool is_captured(at::Device device) {
  return device.is_cuda() && is_capturing(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

}  // namespace ligature::cuda
