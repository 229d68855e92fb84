// Grouped GEMMs that sum over a group's rows: the gradients of its weight.
#include "ligature/backend/cuda/wgmma_grouped.cuh"

namespace ligature::cuda {
namespace {

using Weights = GroupedTile<GroupedForm::Weights>;

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename Out>
bool launch(const GroupedWeightsArgs& from, const GroupOuts& outs, int sm_count, Stream stream) {
  constexpr auto kKernel = grouped_weights_kernel<Weights, Out>;
  if (!has_hopper_code<kKernel, Weights::kSharedBytes>()) return false;
  CUtensorMap dy_map, x_map;
  if (!encode_boxes(&dy_map, from.dy, from.rows, from.m, Weights::kDepth, 2) ||
      !encode_boxes(&x_map, from.x, from.rows, from.n, Weights::kDepth, 2)) {
    return false;
  }
  GroupedWeightsParams args;
  args.groups = from.groups;
  args.m = static_cast<int>(from.m);
  args.n = static_cast<int>(from.n);
  args.accumulate = from.accumulate;
  const int64_t tiles =
      outs.count * parts_of(from.m, Weights::kRows) * parts_of(from.n, Weights::kColumns);
  const auto blocks = static_cast<unsigned int>(std::min<int64_t>(tiles, sm_count));
  grouped_weights_kernel<Weights, Out>
      <<<blocks, Weights::kThreads, Weights::kSharedBytes, stream>>>(dy_map, x_map, args, outs);
  return true;
}

}  // namespace

bool grouped_weights_fit(const GroupedWeightsArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return args.rows > 0 && args.rows < kMost && args.m > 0 && args.m < kMost && args.n > 0 &&
         args.n < kMost && args.groups.count > 0 && args.m % 8 == 0 && args.n % 8 == 0 &&
         aligned(args.dy) && aligned(args.x) && has_tensor_maps() &&
         has_hopper_code<grouped_weights_kernel<Weights, float>, Weights::kSharedBytes>();
}

bool launch_grouped_weights(const GroupedWeightsArgs& args, const GroupOuts& outs, int sm_count,
                            Stream stream) {
  if (args.type == Type::Float32) return launch<float>(args, outs, sm_count, stream);
  return launch<__nv_bfloat16>(args, outs, sm_count, stream);
}

}  // namespace ligature::cuda
