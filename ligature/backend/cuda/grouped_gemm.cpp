// Which way a grouped GEMM goes on the device. Torch's grouped GEMM and our own find the groups on
// the device; where neither takes the operands, the caller has one group after the other computed,
// for which the host has to know them.
#include "ligature/backend/cuda/grouped_gemm.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>

#include "ligature/backend/cuda/grouped_ends.h"
#include "ligature/backend/cuda/launch.h"
#include "ligature/kernels/devices.h"

namespace ligature::cuda {
namespace {

using kernels::LinearGemm;

std::atomic<bool>& wgmma_use() {
  static std::atomic<bool> use = [] {
    const char* text = std::getenv("LIGATURE_GROUPED_WGMMA");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return use;
}

enum class Path : uint8_t { GroupByGroup, GroupedMm, Wgmma };

// ---- operands

/// Also one without memory that stands for one here: what a plan would run is asked with it.
bool readable(const Tensor& t) {
  const bool here = t.is_cuda() || (t.is_meta() && kernels::device_behind(t) == at::kCUDA);
  return here && t.scalar_type() == at::kBFloat16 && t.dim() == 2 && !t.is_neg();
}

bool aligned(const Tensor& t) {
  return t.is_meta() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

/// Can its rows be read in whole vectors once it is contiguous?
bool has_vectors(const Tensor& t) { return t.size(1) > 0 && t.size(1) % 8 == 0; }

/// How far apart tensors of the same size lie in one storage, if they do so at equal distances.
std::optional<int64_t> stride_of(at::TensorList tensors) {
  const Tensor& first = tensors[0];
  if (!first.has_storage()) return std::nullopt;
  const int64_t stride =
      tensors.size() > 1 ? tensors[1].storage_offset() - first.storage_offset() : first.numel();
  if (stride < first.numel()) return std::nullopt;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    const bool same = t.has_storage() && t.is_contiguous() && t.sizes() == first.sizes() &&
                      t.scalar_type() == first.scalar_type() &&
                      t.storage().unsafeGetStorageImpl() == first.storage().unsafeGetStorageImpl();
    if (!same || t.storage_offset() != first.storage_offset() + static_cast<int64_t>(i) * stride) {
      return std::nullopt;
    }
  }
  return stride;
}

/// One tensor [groups, ...], a view where the groups' lie at equal distances.
Tensor packed(at::TensorList tensors) {
  const std::optional<int64_t> stride = stride_of(tensors);
  if (!stride || *stride % 8 != 0 || !aligned(tensors[0])) return at::stack(tensors);
  at::DimVector sizes(tensors[0].sizes()), strides(tensors[0].strides());
  sizes.insert(sizes.begin(), static_cast<int64_t>(tensors.size()));
  strides.insert(strides.begin(), *stride);
  return tensors[0].as_strided(sizes, strides, tensors[0].storage_offset());
}

/// The biases as kernels read them.
struct Biases {
  Tensor held;
  const void* data = nullptr;
  int64_t stride = 0;
  Type type = Type::Float32;

  explicit Biases(at::TensorList bias) {
    if (bias.empty()) return;
    held = serve(packed(bias));
    data = held.const_data_ptr();
    stride = held.stride(0);
    type = type_of(held);
  }
};

Tensor scale_of(const GroupedGemmDesc& d) {
  return d.row_scale.defined() ? cast(d.row_scale, at::kFloat).contiguous() : Tensor();
}

const int32_t* index_of(const Tensor& index, Tensor& held) {
  if (!index.defined()) return nullptr;
  held = cast(index, at::kInt).contiguous();
  return held.const_data_ptr<int32_t>();
}

/// Contiguous rows that vectors can be read from, gathered where there is an index.
Tensor rows_of(const Tensor& t, const Tensor& index, const Groups& groups, const GroupEnds& ends) {
  if (!index.defined()) {
    const Tensor rows = t.contiguous();
    return aligned(rows) ? rows : rows.clone();
  }
  const Tensor from = t.contiguous();
  Tensor held, rows = empty_on({groups.rows, t.size(1)}, t.scalar_type(), t.device());
  GatherArgs args;
  args.rows = groups.rows;
  args.row_bytes = t.size(1) * static_cast<int64_t>(t.element_size());
  args.x_rows = t.size(0);
  args.x = from.const_data_ptr();
  args.index = index_of(index, held);
  args.groups = ends;
  args.y = rows.mutable_data_ptr();
  launch<&launch_gather_rows>("grouped gather", stream_of(t), args);
  return rows;
}

/// Calls f(outs) for the results of at most GroupOuts::kMost groups at a time.
template <typename F>
void for_each_outs(at::TensorList outs, const F& f) {
  const auto count = static_cast<int64_t>(outs.size());
  for (int64_t first = 0; first < count; first += GroupOuts::kMost) {
    GroupOuts some;
    some.first = static_cast<int32_t>(first);
    some.count = static_cast<int32_t>(std::min<int64_t>(count - first, GroupOuts::kMost));
    for (int32_t i = 0; i < some.count; ++i) {
      some.out[i] = outs[static_cast<size_t>(first + i)].mutable_data_ptr();
    }
    f(some);
  }
}

// ---- which way

/// What both ways with groups on the device ask for.
bool fits(const GroupedGemmDesc& d) {
  constexpr int64_t kMostGroups = 1023;  // torch's
  if (!readable(d.a) || !has_vectors(d.a) || d.groups.count == 0 || d.groups.count > kMostGroups ||
      d.groups.rows > std::numeric_limits<int32_t>::max() / 2) {
    return false;
  }
  const auto good = [&](const Tensor& t) {
    return readable(t) && has_vectors(t) && t.device() == d.a.device();
  };
  if (!std::all_of(d.b.begin(), d.b.end(), good)) return false;
  if (d.kind != LinearGemm::WeightGrad) {
    const Tensor& out = d.outs[0];
    return good(out) && out.is_contiguous() && aligned(out) && d.b[0].size(0) % 8 == 0;
  }
  return std::all_of(d.outs.begin(), d.outs.end(), [&](const Tensor& out) {
    return out.dim() == 2 && out.is_contiguous() && out.device() == d.a.device() && aligned(out) &&
           (out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16) &&
           out.scalar_type() == d.outs[0].scalar_type();
  });
}

/// Sizes alone: addresses are those of copies that are made where they have to be.
bool wgmma_fits(const GroupedGemmDesc& d, at::Device device) {
  const DeviceGuard guard(device);
  GroupEnds groups;
  groups.count = static_cast<int32_t>(d.groups.count);
  if (d.kind == LinearGemm::WeightGrad) {
    GroupedWeightsArgs args;
    args.rows = d.groups.rows;
    args.m = d.a.size(1);
    args.n = d.b[0].size(1);
    args.groups = groups;
    return grouped_weights_fit(args);
  }
  const bool biases = std::all_of(d.bias.begin(), d.bias.end(),
                                  [](const Tensor& b) { return b.scalar_type() == at::kBFloat16; });
  GroupedRowsArgs args;
  args.rows = d.groups.rows;
  args.columns = d.outs[0].size(1);
  args.k = d.a.size(1);
  args.groups = groups;
  return biases && grouped_rows_fit(args);
}

Path path_of(const GroupedGemmDesc& d) {
  if (!fits(d)) return Path::GroupByGroup;
  const at::Device device = place_of(d.a);
  // On others torch's grouped GEMM reads the sizes on the host.
  const int major = at::cuda::getDeviceProperties(device.index())->major;
  if (major != 9 && major != 10) return Path::GroupByGroup;
  return grouped_wgmma() && wgmma_fits(d, device) ? Path::Wgmma : Path::GroupedMm;
}

// ---- the ways

void rows_by_grouped_mm(const GroupedGemmDesc& d, const DeviceEnds& ends) {
  const Tensor a = rows_of(d.a, d.a_index, d.groups, ends.groups());
  const Tensor w = packed(d.b);
  const bool forward = d.kind == LinearGemm::Forward;
  const Tensor y = at::_grouped_mm(a, forward ? w.transpose(1, 2) : w, ends.ends());
  const Biases bias(d.bias);
  const Tensor scale = scale_of(d);
  FinishRowsArgs args;
  args.rows = d.groups.rows;
  args.columns = d.outs[0].size(1);
  args.groups = ends.groups();
  args.y = y.const_data_ptr();
  args.bias = bias.data;
  args.bias_stride = bias.stride;
  args.bias_type = bias.type;
  args.scale = static_cast<const float*>(data_of(scale));
  args.out = d.outs[0].mutable_data_ptr();
  launch<&launch_finish_rows>("grouped rows", stream_of(d.a), args);
}

void weights_by_grouped_mm(const GroupedGemmDesc& d, const DeviceEnds& ends) {
  const Tensor dy = rows_of(d.a, d.a_index, d.groups, ends.groups());
  const Tensor x = rows_of(d.b[0], d.b_index, d.groups, ends.groups());
  const Tensor dw = at::_grouped_mm(dy.t(), x, ends.ends()).contiguous();
  FinishWeightsArgs args;
  args.size = dw.size(1) * dw.size(2);
  args.groups = ends.groups();
  args.dw = dw.const_data_ptr();
  args.type = type_of(d.outs[0]);
  args.accumulate = d.accumulate;
  for_each_outs(d.outs, [&](const GroupOuts& outs) {
    launch<&launch_finish_weights>("grouped weights", stream_of(d.a), args, outs);
  });
}

void rows_by_wgmma(const GroupedGemmDesc& d, const DeviceEnds& ends) {
  const Tensor x = rows_of(d.a, d.a_index, d.groups, ends.groups());
  const Tensor w = packed(d.b);
  const Biases bias(d.bias);
  const Tensor scale = scale_of(d);
  GroupedRowsArgs args;
  args.rows = d.groups.rows;
  args.columns = d.outs[0].size(1);
  args.k = x.size(1);
  args.groups = ends.groups();
  args.x = x.const_data_ptr();
  args.w = w.const_data_ptr();
  args.w_stride = w.stride(0);
  args.bias = bias.data;
  args.bias_stride = bias.stride;
  args.scale = static_cast<const float*>(data_of(scale));
  args.out = d.outs[0].mutable_data_ptr();
  const Stream stream = stream_of(d.a);
  if (d.kind == LinearGemm::Forward) {
    launch<&launch_grouped_rows>("grouped_linear_forward", stream, args, sm_count(d.a));
  } else {
    launch<&launch_grouped_rows_across>("grouped_linear_input_grad", stream, args, sm_count(d.a));
  }
  TailArgs tail;
  tail.rows = args.rows;
  tail.row_bytes = args.columns * 2;
  tail.groups = args.groups;
  tail.out = args.out;
  launch<&launch_zero_tail>("grouped rows: tail", stream, tail, sm_count(d.a));
}

void weights_by_wgmma(const GroupedGemmDesc& d, const DeviceEnds& ends) {
  const Tensor dy = rows_of(d.a, d.a_index, d.groups, ends.groups());
  const Tensor x = rows_of(d.b[0], d.b_index, d.groups, ends.groups());
  GroupedWeightsArgs args;
  args.rows = d.groups.rows;
  args.m = dy.size(1);
  args.n = x.size(1);
  args.groups = ends.groups();
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.type = type_of(d.outs[0]);
  args.accumulate = d.accumulate;
  for_each_outs(d.outs, [&](const GroupOuts& outs) {
    launch<&launch_grouped_weights>("grouped_linear_weight_grad", stream_of(d.a), args, outs,
                                    sm_count(d.a));
  });
}

}  // namespace

bool grouped_wgmma() { return wgmma_use().load(std::memory_order_relaxed); }
void set_grouped_wgmma(bool on) { wgmma_use().store(on, std::memory_order_relaxed); }

bool grouped_gemm(const GroupedGemmDesc& d) {
  if (d.groups.rows == 0) {  // whatever the sizes are
    if (d.kind == LinearGemm::WeightGrad && !d.accumulate) {
      for (const Tensor& out : d.outs) out.zero_();
    }
    return true;
  }
  const Path path = path_of(d);
  if (path == Path::GroupByGroup) return false;
  const DeviceGuard guard(d.a.device());
  const DeviceEnds ends = DeviceEnds::of(d.groups, d.a.device());
  const bool rows = d.kind != LinearGemm::WeightGrad;
  if (path == Path::Wgmma) {
    rows ? rows_by_wgmma(d, ends) : weights_by_wgmma(d, ends);
  } else {
    rows ? rows_by_grouped_mm(d, ends) : weights_by_grouped_mm(d, ends);
  }
  return true;
}

const char* grouped_gemm_name(const GroupedGemmDesc& d) {
  if (d.groups.rows == 0) return "cuda";
  switch (path_of(d)) {
    case Path::Wgmma:
      return "wgmma, not run yet";
    case Path::GroupedMm:
      return "grouped_mm";
    case Path::GroupByGroup:
      break;
  }
  return nullptr;
}

Tensor grouped_bias_grad(const Tensor& dy_, const Groups& groups, const Tensor& row_scale,
                         const Tensor& index) {
  const DeviceGuard guard(dy_.device());
  const Tensor dy = dy_.contiguous();
  Tensor held_index, scale;
  if (row_scale.defined()) scale = cast(row_scale, at::kFloat).contiguous();
  Tensor db = empty_on({groups.count, dy.size(1)}, dy.scalar_type(), dy.device());
  GroupedBiasArgs args;
  args.rows = groups.rows;
  args.columns = dy.size(1);
  args.x_rows = dy.size(0);
  args.x = dy.const_data_ptr();
  args.index = index_of(index, held_index);
  args.type = type_of(dy);
  const ColumnGrid grid = grouped_bias_grid(args, sm_count(dy));
  const Cut cut = grouped_bias_cut(grid);
  const DeviceEnds ends = DeviceEnds::of(groups, dy.device(), cut);
  const Tensor partials =
      empty_on({most_parts(groups.rows, groups.count, cut), dy.size(1)}, at::kFloat, dy.device());
  args.groups = ends.groups();
  args.scale = static_cast<const float*>(data_of(scale));
  args.partials = static_cast<float*>(partials.mutable_data_ptr());
  args.db = db.mutable_data_ptr();
  const Stream stream = stream_of(dy);
  launch<&launch_grouped_bias_partials>("grouped_bias_grad", stream, args, grid);
  launch<&launch_grouped_bias_sums>("grouped_bias_grad: sums", stream, args);
  return db;
}

Tensor grouped_scale_grad(const Tensor& dy_, at::TensorList bias_, const Groups& groups,
                          const Tensor& index) {
  const DeviceGuard guard(dy_.device());
  const Tensor dy = dy_.contiguous();
  const DeviceEnds ends = DeviceEnds::of(groups, dy.device());
  const Biases bias(bias_);
  Tensor held_index, dscale = empty_on({groups.rows}, at::kFloat, dy.device());
  GroupedScaleArgs args;
  args.rows = groups.rows;
  args.columns = dy.size(1);
  args.x_rows = dy.size(0);
  args.groups = ends.groups();
  args.x = dy.const_data_ptr();
  args.index = index_of(index, held_index);
  args.bias = bias.data;
  args.bias_stride = bias.stride;
  args.bias_type = bias.type;
  args.out = static_cast<float*>(dscale.mutable_data_ptr());
  args.type = type_of(dy);
  launch<&launch_grouped_scale_grad>("grouped_scale_grad", stream_of(dy), args);
  return dscale;
}

}  // namespace ligature::cuda
