// Which of the products with a gated activation run, and in which form.
#include "ligature/backend/cuda/wgmma_launch.h"

#include "ligature/backend/cuda/tensor_map.h"

namespace ligature::cuda {
namespace {

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// `units`: those of a tile; `depth`: of k in one.
bool fits(const GatedLinearArgs& args, int64_t units, int64_t depth = 64) {
  constexpr int64_t kMost = int64_t{1} << 30;  // a kernel counts to twice that
  const bool kind = args.params.kind == Activation::SwiGLU || args.params.kind == Activation::GEGLU;
  return kind && args.params.interleave == 0 && args.rows > 0 && args.units > 0 && args.k > 0 &&
         args.rows < kMost && args.units < kMost && args.k < kMost && args.k % depth == 0 &&
         args.units % units == 0 && aligned(args.x) && aligned(args.w) && aligned(args.z) &&
         aligned(args.out) && aligned(args.activated) && has_tensor_maps();
}

}  // namespace

bool gated_forward_fits(const GatedLinearArgs& args) {
  return fits(args, 128) && has_gated_forward();
}

bool gated_backward_fits(const GatedLinearArgs& args) {
  return fits(args, 256) && has_gated_backward();
}

bool gated_codes_fit(const GatedLinearArgs& args) {
  const GatedCodes& codes = args.codes;
  return fits(args, 128, 128) && args.rows % 16 == 0 && aligned(codes.rowwise) &&
         aligned(codes.columnwise) && has_gated_codes();
}

// Milliseconds on an H200 with SwiGLU, each against cuBLASLt and the activation's own kernel:
//   rows, k, units          forward  Alone    Pair   backward    Pair  Skewed   both    Pair
//   2048,  1024,  2816        .0488  .0464   .0506      .0387   .0501   .0398  .0530   .0549
//   4096,  2048,  5632         .330   .309    .308       .211    .213    .203   .249    .228
//   8192,  4096, 14336        3.016  2.992   2.945      1.799   1.655   1.672  1.963   1.693
//   16384, 4096, 14336        6.257  5.964   5.879      3.473   3.238   3.327  3.769   3.318
// Of FP8 codes forward, the activation as codes in both orientations with a factor known before,
// and with one from its own largest value:
//   rows, k, units          delayed   Pair  current   Pair
//   2048,  1024,  2816        .0340  .0314    .0431  .0359
//   4096,  2048,  5632         .212   .178     .232   .191
//   8192,  4096, 14336        1.805  1.546    1.833  1.638
//   16384, 4096, 14336        3.536  3.067    3.612  3.267
// (Backward it does not pay: a product of FP8 that moves its sums to float32 now and then has room
// for tiles of 128x128 with an epilogue apart, and those wait for shared memory.)
// A tile's epilogue backward is long (128 KB are read and as many written): apart it hides behind
// the products of the next tile where k is long, and nothing hides that of the last tile. A round
// of tiles that leaves many multiprocessors without one costs more than is gained.
GatedChoice choose_gated(GatedLinear what, const GatedLinearArgs& args, int sm_count) {
  const bool codes = what == GatedLinear::ForwardCodes;
  const bool forward = what == GatedLinear::Forward || codes;
  GatedChoice choice{GatedTile::Pair, true};
  if (forward && !codes && args.k < 2048) choice.tile = GatedTile::Alone;
  if (what == GatedLinear::Backward && args.k >= 1024 && args.k < 3072) {
    choice.tile = GatedTile::Skewed;
  }
  const int64_t cluster = choice.tile == GatedTile::Alone ? 1 : 2;
  const int64_t down = (args.rows + 128 * cluster - 1) / (128 * cluster) * cluster;
  const int64_t tiles = down * (args.units / (forward ? 128 : 256));
  const int64_t rounds = (tiles + sm_count - 1) / sm_count;
  constexpr double kBusy = 0.85;
  choice.pays = args.k >= (forward ? 1024 : 2048) && tiles >= (forward ? 2 : 4) * sm_count &&
                static_cast<double>(tiles) >= kBusy * static_cast<double>(rounds * sm_count);
  return choice;
}

}  // namespace ligature::cuda
