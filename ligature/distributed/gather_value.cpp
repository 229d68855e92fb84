#include "ligature/distributed/gather_value.h"

#include <ATen/ops/_assert_async.h>

#include "ligature/check.h"
#include "ligature/meta.h"

namespace ligature::distributed {
namespace {

using kernels::QuantizedMatrix;
using kernels::QuantizedPair;

/// [ranks * rows, ...] as it arrived.
Tensor joined_rows(const Tensor& all, int64_t /*ranks*/) { return all; }

/// Parts [k, n] of each rank side by side: [k, ranks * n].
Tensor joined_columns(const Tensor& all, int64_t ranks) {
  const int64_t k = all.size(0) / ranks;
  return all.view({ranks, k, all.size(1)}).transpose(0, 1).reshape({k, ranks * all.size(1)});
}

/// One number of each rank, which must be the same one.
Tensor the_one(const Tensor& all, int64_t ranks, const std::string& op, const char* what) {
  const int64_t n = all.size(0) / ranks;
  const Tensor first = all.narrow(0, 0, n).clone();
  const Tensor bits = all.view(at::kInt).view({ranks, n});
  const Tensor same = bits.eq(bits.select(0, 0)).all();
  const std::string message =
      "[" + op +
      "] the ranks quantized with different scales, so their codes cannot be joined: " + what +
      " differs; share amax between them (amax_reduction_group of autocast, or of the "
      "quantizer)";
  if (!all.is_cpu()) {
    at::_assert_async(same, message);
  } else {
    LIGATURE_CHECK_STATE(same.item<bool>(), message);
  }
  return first;
}

/// Scales that a backend keeps column after column stay so.
Tensor with_order_of(const Tensor& like, Tensor t) {
  if (like.dim() != 2 || like.is_contiguous() || like.stride(0) != 1) return t;
  return t.t().contiguous().t();
}

class Joiner {
 public:
  Joiner(const QuantizedTensor& shard, Usage usage) : shard_(shard) {
    if (usage.rowwise) add(shard.rowwise());
    if (usage.columnwise) add(shard.columnwise());
  }

  std::vector<Tensor> parts() const { return parts_; }

  QuantizedPair join(const std::vector<Tensor>& all, int64_t ranks, Usage usage,
                     const std::string& op) const {
    QuantizedPair pair;
    size_t next = 0;
    if (usage.rowwise && shard_.rowwise().defined()) {
      pair.rowwise = join_one(all, next, ranks, op, shard_.rowwise(), &joined_rows);
    }
    if (usage.columnwise && shard_.columnwise().defined()) {
      pair.columnwise = join_one(all, next, ranks, op, shard_.columnwise(), &joined_columns);
    }
    return pair;
  }

 private:
  void add(const QuantizedMatrix& matrix) {
    for (const Tensor* part : {&matrix.data, &matrix.scale, &matrix.amax}) {
      if (part->defined()) parts_.push_back(*part);
    }
  }

  QuantizedMatrix join_one(const std::vector<Tensor>& all, size_t& next, int64_t ranks,
                           const std::string& op, const QuantizedMatrix& shard,
                           Tensor (*place)(const Tensor&, int64_t)) const {
    const bool scale_is_one = shard_.format_tag().per_tensor();
    QuantizedMatrix out;
    out.data = place(all[next++], ranks);
    if (shard.scale.defined()) {
      const Tensor& scale = all[next++];
      out.scale = scale_is_one ? the_one(scale, ranks, op, "the scale")
                               : with_order_of(shard.scale, place(scale, ranks));
    }
    if (shard.amax.defined()) {
      const Tensor& amax = all[next++];
      const bool of_rows = shard_.format_tag().row_scaled && place == &joined_rows;
      out.amax = of_rows ? amax : the_one(amax, ranks, op, "amax");
    }
    return out;
  }

  const QuantizedTensor& shard_;
  std::vector<Tensor> parts_;
};

}  // namespace

Value PendingValue::wait() {
  const std::vector<Tensor>& all = transfer_.wait();
  return assemble_ ? assemble_(all) : Value(all[0]);
}

std::string why_not_joined(const Format& format, Usage usage, int64_t rows) {
  if (format.per_tensor()) return "";
  const int64_t block = format.block_size();
  const bool blocks_of_rows = usage.columnwise || (usage.rowwise && format.block_2d);
  if (blocks_of_rows && rows % block != 0) {
    return "its blocks have " + std::to_string(block) + " rows, and each rank has " +
           std::to_string(rows);
  }
  if (usage.columnwise && format.row_scaled) {
    return "its column-wise scales are of all tokens";
  }
  return "";
}

double bytes_per_element(const Format& format, Usage usage) {
  const double data = format.element == Element::E2M1 ? 0.5 : 1.0;
  double scale = 0.0;
  if (format.block_size() > 0) {
    scale = (format.scaling == Scaling::Block ? 4.0 : 1.0) /
            static_cast<double>(format.block_size() * (format.block_2d ? format.block_size() : 1));
  }
  return (data + scale) * (int(usage.rowwise) + int(usage.columnwise));
}

Value rows_of(const Value& value, int64_t first, int64_t count) {
  if (!value.is_quantized()) {
    const Tensor& t = value.tensor();
    return t.view({-1, t.size(-1)}).narrow(0, first, count);
  }
  const QuantizedTensor& q = *value.quantized();
  const Format& format = q.format_tag();
  const int64_t block = format.block_2d ? format.block_size() : 1;
  LIGATURE_CHECK_STATE(first % block == 0 && q.rowwise().defined(), "rows ", first, " to ",
                       first + count, " of a value in format ", q.format(), " lie inside a block");
  QuantizedPair pair;
  pair.rowwise.data = q.rowwise().data.narrow(0, first, count);
  const Tensor& scale = q.rowwise().scale;
  pair.rowwise.scale =
      format.per_tensor() ? scale : scale.narrow(0, first / block, (count + block - 1) / block);
  const Tensor& amax = q.rowwise().amax;
  if (amax.defined()) {
    pair.rowwise.amax = format.row_scaled ? amax.narrow(0, first, count) : amax;
  }
  return std::make_shared<QuantizedTensor>(format, std::vector<int64_t>{count, q.columns()},
                                           q.dtype(), std::move(pair), q.quantizer());
}

PendingValue all_gather(const GroupPtr& group, const Value& shard, Usage usage,
                        const std::string& op) {
  if (!shard.is_quantized()) {
    return {all_gather(group, std::vector<Tensor>{shard.tensor()}, Purpose{op, ""}), nullptr};
  }
  const QuantizedPtr q = shard.quantized();
  const std::string why = why_not_joined(q->format_tag(), usage, q->rows());
  LIGATURE_CHECK(why.empty(), "[", op, "] shards ", sizes_string(q->sizes()), " in format ",
                 q->format(), " cannot be gathered as they are: ", why);
  const auto joiner = std::make_shared<Joiner>(*q, usage);
  LIGATURE_CHECK_STATE(!joiner->parts().empty(), "[", op, "] a shard in format ", q->format(),
                       " has none of the orientations that are wanted");
  const auto assemble = [group, q, joiner, usage, op](const std::vector<Tensor>& all) -> Value {
    std::vector<int64_t> sizes = q->sizes().vec();
    sizes[0] *= group->size();
    return std::make_shared<QuantizedTensor>(q->format_tag(), std::move(sizes), q->dtype(),
                                             joiner->join(all, group->size(), usage, op),
                                             q->quantizer());
  };
  return {all_gather(group, joiner->parts(), Purpose{op, q->format()}), assemble};
}

}  // namespace ligature::distributed
