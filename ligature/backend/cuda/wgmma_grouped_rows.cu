// Grouped GEMMs of rows: a linear layer's result and its input's gradient.
#include "ligature/backend/cuda/wgmma_grouped.cuh"

namespace ligature::cuda {
namespace {

using Along = GroupedTile<GroupedForm::Along>;
using Across = GroupedTile<GroupedForm::Across>;

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename C>
bool launch(const GroupedRowsArgs& from, int sm_count, Stream stream) {
  if (!has_hopper_code<grouped_rows_kernel<C>, C::kSharedBytes>()) return false;
  constexpr bool kAcross = C::kForm == GroupedForm::Across;
  CUtensorMap x_map, w_map;
  if (!encode_boxes(&x_map, from.x, from.rows, from.k, C::kRows, 2) ||
      !encode_stack(&w_map, from.w, from.groups.count, from.w_stride,
                    kAcross ? from.k : from.columns, kAcross ? from.columns : from.k,
                    kAcross ? C::kDepth : C::kHalf)) {
    return false;
  }
  GroupedRowsParams args;
  args.groups = from.groups;
  args.columns = static_cast<int>(from.columns);
  args.k = static_cast<int>(from.k);
  args.bias = static_cast<const __nv_bfloat16*>(from.bias);
  args.bias_stride = from.bias_stride;
  args.scale = from.scale;
  args.out = static_cast<__nv_bfloat16*>(from.out);
  const int64_t most =
      most_parts(from.rows, from.groups.count) * parts_of(from.columns, C::kColumns);
  const auto blocks = static_cast<unsigned int>(std::min<int64_t>(most, sm_count));
  grouped_rows_kernel<C><<<blocks, C::kThreads, C::kSharedBytes, stream>>>(x_map, w_map, args);
  return true;
}

}  // namespace

bool grouped_rows_fit(const GroupedRowsArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return args.rows > 0 && args.rows < kMost && args.columns > 0 && args.columns < kMost &&
         args.k > 0 && args.k < kMost && args.groups.count > 0 && args.columns % 8 == 0 &&
         args.k % 8 == 0 && args.w_stride % 8 == 0 && args.bias_stride % 2 == 0 &&
         aligned(args.x) && aligned(args.w) && aligned(args.bias) && aligned(args.out) &&
         has_tensor_maps() && has_hopper_code<grouped_rows_kernel<Along>, Along::kSharedBytes>();
}

bool launch_grouped_rows(const GroupedRowsArgs& args, int sm_count, Stream stream) {
  return launch<Along>(args, sm_count, stream);
}

bool launch_grouped_rows_across(const GroupedRowsArgs& args, int sm_count, Stream stream) {
  return launch<Across>(args, sm_count, stream);
}

}  // namespace ligature::cuda
