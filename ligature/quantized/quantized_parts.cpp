#include "ligature/quantized/quantized_parts.h"

#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <array>

#include "ligature/meta.h"

namespace ligature {
namespace {

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

SideLayout side_layout(const Format& f, int64_t rows, int64_t columns) {
  const bool nv = f.scaling == Scaling::NV;
  const int64_t size = f.block_size();
  SideLayout out;
  out.data = {at::kByte, {rows, f.element == Element::E2M1 ? blocks(columns, 2) : columns}};
  out.scale = {nv || f.scaling == Scaling::MX ? at::kByte : at::kFloat, {1}};
  if (size > 0) out.scale.sizes = {f.block_2d ? blocks(rows, size) : rows, blocks(columns, size)};
  if (nv) out.amax = PartLayout{at::kFloat, {f.row_scaled ? rows : 1}};
  return out;
}

int64_t rows_of(at::IntArrayRef sizes) {
  int64_t rows = 1;
  for (const int64_t size : sizes.slice(0, sizes.size() - 1)) {
    if (c10::mul_overflows(rows, size, &rows)) return -1;  // which no tensor has
  }
  return rows;
}

/// Do two elements lie in one place? Answers yes where it cannot be told from the strides alone.
bool may_overlap(const at::Tensor& t) {
  if (t.numel() < 2 || t.is_non_overlapping_and_dense()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

int64_t bytes_needed(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += t.stride(d) * (t.size(d) - 1);
  return (last + 1) * static_cast<int64_t>(t.element_size());
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || a.is_meta() || a.numel() == 0 || b.numel() == 0) return false;
  if (!a.storage().is_alias_of(b.storage())) return false;
  const auto begin = [](const at::Tensor& t) {
    return t.storage_offset() * static_cast<int64_t>(t.element_size());
  };
  return begin(a) < bytes_needed(b) && begin(b) < bytes_needed(a);
}

}  // namespace

SideLayout rowwise_layout(const Format& format, at::IntArrayRef sizes) {
  return side_layout(format, rows_of(sizes), sizes.back());
}

SideLayout columnwise_layout(const Format& format, at::IntArrayRef sizes) {
  const int64_t rows = rows_of(sizes);
  return side_layout(format, sizes.back(), format.hadamard ? blocks(rows, 16) * 16 : rows);
}

std::string why_unusable(const at::Tensor& part) {
  if (const QuantizedPtr quantized = quantized_of(part)) {
    return "a plain tensor, got a quantized one (" + quantized->format() + ")";
  }
  if (part.layout() != at::kStrided || part.is_nested()) {
    return "dense, got a " + std::string(part.is_nested() ? "nested" : "sparse") + " tensor";
  }
  const c10::DispatchKeySet keys = part.key_set();
  const c10::DispatchKeySet others(
      {c10::DispatchKey::Python, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate,
       c10::DispatchKey::Negative, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  if (keys.has_any(others)) {
    return "a plain tensor, got one that stands for others (" + c10::toString(keys & others) + ")";
  }
  if (part.is_meta()) return "";
  if (!part.has_storage() || static_cast<int64_t>(part.storage().nbytes()) < bytes_needed(part)) {
    return "a tensor with memory, got one whose memory was freed";
  }
  if (may_overlap(part)) {
    return "a tensor whose elements have memory of their own, got shape " +
           sizes_string(part.sizes()) + " with strides " + sizes_string(part.strides());
  }
  return "";
}

std::string why_not_together(const kernels::QuantizedPair& parts,
                             const std::function<std::string(size_t)>& name_of) {
  const std::array<at::Tensor, 6> all{parts.rowwise.data,     parts.rowwise.scale,
                                      parts.rowwise.amax,     parts.columnwise.data,
                                      parts.columnwise.scale, parts.columnwise.amax};
  const at::Device device = (parts.rowwise.defined() ? all[0] : all[3]).device();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].defined()) continue;
    if (all[i].device() != device) {
      return name_of(i) + " must be on " + device.str() + ", as its other parts are, got " +
             all[i].device().str();
    }
    for (size_t j = 0; j < i; ++j) {
      const bool of_the_tensor = i == j + 3 && j > 0;  // both orientations may have one scale, amax
      if (!of_the_tensor && share_memory(all[i], all[j])) {
        return name_of(i) + " must have memory of its own, got that of another part";
      }
    }
  }
  return "";
}

}  // namespace ligature
