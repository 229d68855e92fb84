#include "ligature/distributed/overlap_model.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

namespace ligature::distributed {

double predicted_seconds(const OverlapTimes& times, int64_t ranks, int64_t pieces) {
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const double after_last = times.gemm * others / static_cast<double>(pieces);
  return std::max(times.gemm, (pieces > 1 ? times.cut : times.transfer) + after_last) +
         static_cast<double>(pieces - 1) * times.latency;
}

int64_t piece_rows(int64_t rows, int64_t pieces, int64_t block) {
  constexpr int64_t kTile = 16;
  const int64_t unit = std::max(block, kTile);
  return (rows + pieces * unit - 1) / (pieces * unit) * unit;
}

int64_t best_pieces(const OverlapTimes& times, int64_t ranks, int64_t rows, int64_t least) {
  int64_t best = 1;
  for (int64_t pieces = 2; pieces <= 8 && rows / pieces >= least; pieces *= 2) {
    if (predicted_seconds(times, ranks, pieces) < predicted_seconds(times, ranks, best)) {
      best = pieces;
    }
  }
  return best;
}

OverlapModel::Choice OverlapModel::choose(const GroupPtr& group, const Size& size, bool on_cpu) {
  const GroupOptions options = group->options();
  if (!options.overlap || group->alone()) return {};
  if (options.pieces > 0) return {std::clamp<int64_t>(options.pieces, 1, size.rows), false};
  if (!on_cpu) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t call = calls_++;
  if (call == 0) return {};
  if (call == 1) return {1, true};
  if (!known_) agree(group);
  const OverlapTimes here{agreed_.transfer * size.bytes, agreed_.cut * size.bytes,
                          agreed_.gemm * size.flops, agreed_.latency};
  last_ = here;
  ranks_ = group->size();
  pieces_ = best_pieces(here, ranks_, size.rows);
  return {pieces_, false};
}

void OverlapModel::learn(const GroupPtr& group, const Size& size, const OverlapTimes& times) {
  using Clock = std::chrono::steady_clock;
  double latency = std::numeric_limits<double>::infinity();
  const at::Tensor small = at::zeros({1}, at::kFloat);
  for (int i = 0; i < 3; ++i) {
    const auto begin = Clock::now();
    all_gather(group, {small}, {"overlap model", ""}).wait();
    latency = std::min(latency, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const double bytes = std::max(size.bytes, 1.0);
  own_ = {times.transfer / bytes, times.cut / bytes, times.gemm / std::max(size.flops, 1.0),
          latency};
}

// A rank that comes late sees a short transfer, the others wait for it too: the shortest is the
// link's. The slowest GEMM is what all wait for.
void OverlapModel::agree(const GroupPtr& group) {
  at::Tensor numbers =
      at::tensor({-own_.transfer, -own_.cut, own_.gemm, -own_.latency}, at::kDouble);
  all_reduce_max(group, numbers, {"overlap model", ""});
  const double* agreed = numbers.const_data_ptr<double>();
  agreed_ = {-agreed[0], -agreed[1], agreed[2], -agreed[3]};
  known_ = true;
}

std::string OverlapModel::text() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!known_) return "";
  const double together = predicted_seconds(last_, ranks_, pieces_);
  const double transfer = pieces_ > 1 ? last_.cut : last_.transfer;
  const double exposed = std::clamp(together - last_.gemm, 0.0, transfer);
  const double hidden = transfer > 0 ? 1.0 - exposed / transfer : 0.0;
  char text[200];
  std::snprintf(text, sizeof(text),
                "in %d pieces: %.2f ms predicted, from %.2f ms of communication and %.2f ms of "
                "GEMM; %.0f %% hidden",
                static_cast<int>(pieces_), together * 1e3, transfer * 1e3, last_.gemm * 1e3,
                hidden * 100);
  return text;
}

}  // namespace ligature::distributed
