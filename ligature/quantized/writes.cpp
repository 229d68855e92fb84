#include "ligature/quantized/writes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "ligature/check.h"
#include "ligature/meta.h"

namespace ligature {
namespace {

// Below autograd nothing counts versions: here it is made sure that every write does.
template <class F>
void writing(const QuantizedTensor& to, F&& write) {
  std::vector<std::pair<Tensor, uint32_t>> before;
  for (const Tensor& t : to.tensors()) {
    if (!t.is_inference()) before.emplace_back(t, t._version());
  }
  at::NoGradGuard no_grad;
  write();
  for (const auto& [t, version] : before) {
    if (t._version() == version) t.unsafeGetTensorImpl()->bump_version();
  }
}

Tensor quantizable(const Tensor& values) {
  const Tensor plain = values.detach();
  const at::ScalarType dtype = plain.scalar_type();
  const bool fits = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return fits ? plain : plain.to(at::kFloat);
}

}  // namespace

bool has_recipe_state(const QuantizerPtr& quantizer) {
  return quantizer != nullptr && quantizer->delayed != nullptr && quantizer->delayed->recipe;
}

std::shared_ptr<Quantizer> quantizer_for(const QuantizedPtr& q) {
  if (q->quantizer() != nullptr) return std::const_pointer_cast<Quantizer>(q->quantizer());
  auto made = std::make_shared<Quantizer>(q->format_tag(),
                                          Usage{q->rowwise().defined(), q->columnwise().defined()});
  if (q->format_tag().scaling == Scaling::Delayed) {
    const auto& part = q->rowwise().defined() ? q->rowwise() : q->columnwise();
    made->delayed = std::make_shared<DelayedScale>();
    made->delayed->scale = part.scale.reciprocal();
    made->delayed->max_value = max_value(q->format_tag().element);
  }
  q->set_quantizer(made);
  return made;
}

std::shared_ptr<Quantizer> deep_copy(const Quantizer& quantizer) {
  auto made = quantizer.copy();
  if (made->delayed == nullptr) return made;
  made->delayed = std::make_shared<DelayedScale>(*made->delayed);
  made->delayed->graph_scale.reset();
  for (Tensor* t : {&made->delayed->scale, &made->delayed->amax, &made->delayed->history}) {
    if (t->defined()) *t = t->clone();
  }
  return made;
}

bool same_layout(const QuantizedTensor& a, const QuantizedTensor& b) {
  return a.format_tag() == b.format_tag() && a.sizes() == b.sizes() &&
         a.rowwise().defined() == b.rowwise().defined() &&
         a.columnwise().defined() == b.columnwise().defined();
}

void write_quantized(const QuantizedPtr& to, const Tensor& values, const Quantizer& quantizer) {
  writing(*to, [&] { quantizer.update(quantizable(values), *to); });
}

QuantizedPtr quantized_like(const QuantizedPtr& like, const Tensor& values) {
  return quantizer_for(like)->fit(quantizable(values),
                                  {like->rowwise().defined(), like->columnwise().defined()});
}

namespace {

/// The parts of `from` that `to` has, without rounding again; null where they cannot be had.
QuantizedPtr parts_for(const QuantizedTensor& to, const QuantizedPtr& from) {
  if (from->format_tag() != to.format_tag() || from->sizes() != to.sizes()) return nullptr;
  if (same_layout(to, *from)) return from;
  const bool rows = to.rowwise().defined(), columns = to.columnwise().defined();
  const bool complete =
      (!rows || from->rowwise().defined()) && (!columns || from->columnwise().defined());
  if (complete) return from->only(rows, columns);
  if (!to.format_tag().orientations_agree()) return nullptr;
  auto both = std::make_shared<QuantizedTensor>(*from);
  both->make_usage(rows, columns);
  return both->only(rows, columns);
}

}  // namespace

void write_quantized(const QuantizedPtr& to, const Value& values) {
  const QuantizedPtr parts = values.is_quantized() ? parts_for(*to, values.quantized()) : nullptr;
  if (parts != nullptr) {
    if (values.quantized() != to) writing(*to, [&] { to->copy_from(*parts); });
    return;
  }
  const Tensor plain = values.dequantized();
  LIGATURE_CHECK(plain.sizes() == to->sizes(), "wanted a tensor of shape ",
                 sizes_string(to->sizes()), ", got ", sizes_string(plain.sizes()));
  writing(*to, [&] {
    to->copy_from(*quantized_like(to, plain.to(to->device()))->with_dtype(to->dtype()));
  });
}

QuantizedPtr with_values(const QuantizedTensor& like, const Value& values) {
  at::NoGradGuard no_grad;
  auto made = like.map([&](const Tensor& part) {
    return at::empty_like(part, part.options().device(values.device()));
  });
  write_quantized(made, values);
  // Without memory it did not know on which device it would compute.
  if (const QuantizerPtr& quantizer = like.quantizer()) {
    const Usage usage = quantizer->usage_for({true, true}, values.device());
    made->make_usage(usage.rowwise, usage.columnwise);
  }
  return made;
}

}  // namespace ligature
