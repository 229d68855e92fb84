// Values of all ranks, joined along their first dimension. One in low precision travels as it is:
// codes, scales and amax together, so the ranks' scales are compared and not taken to be equal.
#pragma once

#include "ligature/distributed/collectives.h"
#include "ligature/quantized/quantizer.h"
#include "ligature/value.h"

namespace ligature::distributed {

/// A value under way.
class PendingValue {
 public:
  PendingValue() = default;
  PendingValue(Transfer transfer, std::function<Value(const std::vector<Tensor>&)> assemble)
      : transfer_(std::move(transfer)), assemble_(std::move(assemble)) {}

  bool started() const { return transfer_.started(); }
  bool done() const { return transfer_.done(); }
  Value wait();

 private:
  Transfer transfer_;
  std::function<Value(const std::vector<Tensor>&)> assemble_;
};

/// Why shards of so many rows in this format cannot be joined as they are, in the orientations that
/// are wanted; empty where they can: then the result has the bits of one that was quantized whole,
/// with the same scales.
std::string why_not_joined(const Format& format, Usage usage, int64_t rows);

/// Bytes of one element in a format, scales included.
double bytes_per_element(const Format& format, Usage usage);

/// `usage`: of a quantized value these orientations travel, as far as it has them.
PendingValue all_gather(const GroupPtr& group, const Value& shard, Usage usage,
                        const std::string& op);

/// Rows of a value as a matrix, row-wise data alone; memory is shared. Where a format has blocks of
/// rows, both ends lie between blocks.
Value rows_of(const Value& value, int64_t first, int64_t count);

}  // namespace ligature::distributed
