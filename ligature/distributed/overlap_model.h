// How long a GEMM takes that is computed piece by piece while its operand arrives, or its result
// leaves; and into how many pieces it is best cut.
#pragma once

#include <mutex>
#include <string>

#include "ligature/distributed/collectives.h"

namespace ligature::distributed {

/// In seconds.
struct OverlapTimes {
  double transfer = 0;  ///< the collective alone
  double cut = 0;       ///< the same in pieces, which some backends move faster
  double gemm = 0;      ///< the GEMM alone
  double latency = 0;   ///< what each further piece costs
};

/// Pieces arrive one after the other; a rank's own part of the GEMM is computed first, and each
/// piece when it has arrived. So a GEMM is over when all of it has been computed, or one piece's
/// share of it after the last arrival.
double predicted_seconds(const OverlapTimes& times, int64_t ranks, int64_t pieces);
/// Rows of a piece of so many: whole blocks, and whole tiles of a GEMM, whose last bits depend on
/// how a tile is filled.
int64_t piece_rows(int64_t rows, int64_t pieces, int64_t block);
/// 1, 2, 4 or 8, such that a piece has `least` rows or more.
int64_t best_pieces(const OverlapTimes& times, int64_t ranks, int64_t rows, int64_t least = 64);

/// Learns the times of one layer. Every rank makes the same calls and comes to the same numbers:
/// the first call runs in one piece, the second is measured, then the ranks compare.
class OverlapModel {
 public:
  struct Choice {
    int64_t pieces = 1;
    bool measure = false;  ///< one after the other, to be told to learn()
  };
  struct Size {
    int64_t rows = 0;  ///< that each rank gives
    double bytes = 0;
    double flops = 0;
  };
  Choice choose(const GroupPtr& group, const Size& size, bool on_cpu);
  void learn(const GroupPtr& group, const Size& size, const OverlapTimes& times);
  /// What it predicts for a call like the last one; empty before it has learned.
  std::string text() const;

 private:
  void agree(const GroupPtr& group);
  mutable std::mutex mutex_;
  int64_t calls_ = 0;
  // Per byte, per operation, per piece.
  OverlapTimes own_, agreed_;
  bool known_ = false;
  OverlapTimes last_;  // of the last call
  int64_t ranks_ = 1, pieces_ = 1;
};

}  // namespace ligature::distributed
