#include "ligature/quantization/weights.h"

namespace ligature {
namespace {

const std::shared_ptr<Quantizer>& weight_quantizer(const OpQuantization& state) {
  static const std::shared_ptr<Quantizer> none;
  return state.forward.size() > 1 ? state.forward[1] : none;
}

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

void write_quantized(const QuantizedPtr& to, const Value& values) {
  if (values.is_quantized() && same_layout(*to, *values.quantized())) {
    if (values.quantized() != to) writing(*to, [&] { to->copy_from(*values.quantized()); });
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
  return made;
}

QuantizedPtr quantize_weight(BasicOperation& op, const RecipePtr& recipe, const Tensor& weight) {
  const OpQuantizationPtr state = op.quantization(recipe, weight.device());
  const auto quantizer = state != nullptr ? weight_quantizer(*state) : nullptr;
  if (quantizer == nullptr) return nullptr;
  const std::string why = quantizer->why_not(weight);
  LIGATURE_CHECK_TYPE(why.empty(), "[", op.label(), "] weight: ", why);
  at::NoGradGuard no_grad;
  const Usage usage = quantizer->usage_for({true, true}, weight.device());
  return has_recipe_state(quantizer) && !weight.is_meta()
             ? quantizer->fit(weight.detach(), usage)
             : quantizer->quantize(weight.detach(), usage);
}

void adopt_weight(const BasicOperation& op, const Tensor& weight) {
  const QuantizedPtr quantized = quantized_of(weight);
  if (quantized == nullptr) return;
  const auto states = op.quantizations();
  for (size_t i = states.size(); i-- > 0;) {
    const auto& quantizer = weight_quantizer(*states[i]);
    if (quantizer == nullptr || quantizer->format_tag() != quantized->format_tag()) continue;
    quantized->set_quantizer(quantizer);
    return;
  }
}

}  // namespace ligature
