#include "ligature/archive.h"

#include "ligature/recipes/checkpoint.h"
#include "ligature/recipes/weights.h"
#include "ligature/sequential.h"

namespace ligature {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

CheckpointLookup lookup(InputArchive& archive, const std::string& prefix) {
  return [&archive, prefix](const std::string& key) {
    c10::IValue found;
    if (!archive.try_read(key.substr(prefix.size()), found)) return Tensor();
    LIGATURE_CHECK_STATE(found.isTensor(), "checkpoint entry '", key, "' must be a tensor, got ",
                         found.tagKind());
    return found.toTensor();
  };
}

/// What an archive has for one operation, read and checked. Nothing is changed yet.
struct Incoming {
  std::vector<std::pair<Tensor, Value>> parameters;  // what is there, what it becomes
  std::optional<RecipeState> state;

  Incoming(FusibleOperation& op, InputArchive& archive, const std::string& prefix) {
    const CheckpointLookup find = lookup(archive, prefix);
    for (const auto& item : op.named_parameters(/*recurse=*/false)) {
      const std::string key = prefix + item.key();
      const Tensor& parameter = item.value();
      if (const QuantizedPtr quantized = read_quantized(find, key, parameter.sizes())) {
        parameters.emplace_back(parameter, quantized);
        continue;
      }
      Tensor plain = find(key);
      if (!plain.defined()) {
        const auto other = read_other_layout(find, prefix, op, item.key(), parameter.sizes());
        if (other) plain = other->value();
      }
      LIGATURE_CHECK_STATE(plain.defined(), "checkpoint entry '", key, "' is missing");
      LIGATURE_CHECK_STATE(plain.sizes() == parameter.sizes(), "size mismatch for ", key,
                           ": the shape in the checkpoint is ", sizes_string(plain.sizes()),
                           ", the shape in current model is ", sizes_string(parameter.sizes()));
      LIGATURE_CHECK_STATE(plain.is_floating_point(), "checkpoint entry '", key,
                           "' must be of a floating-point dtype, got ",
                           c10::toString(plain.scalar_type()));
      parameters.emplace_back(parameter, plain.detach());
    }
    if (const BasicOperation* part = op.recipe_state_owner()) {
      state = read_recipe_state(find, prefix, *part);
    }
  }
};

at::Device device_of(const Incoming& incoming) {
  for (const auto& [parameter, value] : incoming.parameters) {
    return parameter.is_meta() ? value.device() : parameter.device();
  }
  return at::kCPU;
}

void write(Tensor parameter, const Value& value) {
  const QuantizedPtr quantized = quantized_of(parameter);
  if (quantized != nullptr && parameter.is_meta()) {
    parameter.set_data(wrap_quantized(with_values(*quantized, value)));
  } else if (quantized != nullptr) {
    write_quantized(quantized, value);
    if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
  } else if (parameter.is_meta()) {
    parameter.set_data(value.dequantized().to(parameter.scalar_type()));
  } else {
    parameter.copy_(value.dequantized());
  }
}

}  // namespace

void FusibleOperation::save(OutputArchive& archive) const {
  for (const auto& item : named_parameters(/*recurse=*/false)) {
    const QuantizedPtr quantized = quantized_of(item.value());
    if (quantized == nullptr) {
      archive.write(item.key(), item.value());
      continue;
    }
    for (const auto& [name, tensor] : quantized_entries(*quantized)) {
      archive.write(item.key() + "." + name, tensor, /*is_buffer=*/true);
    }
  }
  for (const auto& item : named_buffers(/*recurse=*/false)) {
    archive.write(item.key(), item.value(), /*is_buffer=*/true);
  }
  if (const BasicOperation* part = const_cast<FusibleOperation*>(this)->recipe_state_owner()) {
    for (const auto& [name, tensor] : recipe_state_entries(*part)) {
      archive.write(name, tensor, /*is_buffer=*/true);
    }
  }
  for (const auto& child : named_children()) {
    if (!child.value()->is_serializable()) continue;
    OutputArchive below(archive.compilation_unit());
    child.value()->save(below);
    archive.write(child.key(), below);
  }
}

void FusibleOperation::load(InputArchive& archive) {
  if (!named_children().is_empty()) check_archive(*this, archive);
  const Incoming incoming(*this, archive, "");
  torch::NoGradGuard no_grad;
  if (BasicOperation* part = recipe_state_owner()) {
    for (const auto& state : part->quantizations()) state->move_to(device_of(incoming));
  }
  if (incoming.state) {
    load_recipe_state(*recipe_state_owner(), *incoming.state, device_of(incoming));
  }
  for (const auto& [parameter, value] : incoming.parameters) {
    write(parameter, value);
  }
  for (auto& item : named_buffers(/*recurse=*/false)) {
    archive.read(item.key(), item.value(), /*is_buffer=*/true);
  }
  for (const auto& child : named_children()) {
    if (!child.value()->is_serializable()) continue;
    InputArchive below;
    archive.read(child.key(), below);
    child.value()->load(below);
  }
}

void check_archive(torch::nn::Module& model, InputArchive& archive, const std::string& prefix) {
  if (auto* op = dynamic_cast<FusibleOperation*>(&model)) {
    const Incoming checked(*op, archive, prefix);
  }
  for (const auto& child : model.named_children()) {
    if (!child.value()->is_serializable()) continue;
    InputArchive below;
    LIGATURE_CHECK_STATE(archive.try_read(child.key(), below), "checkpoint entry '", prefix,
                         child.key(), "' is missing");
    check_archive(*child.value(), below, prefix + child.key() + ".");
  }
}

void SequentialImpl::load(InputArchive& archive) {
  check_archive(*this, archive);
  torch::nn::Module::load(archive);
}

}  // namespace ligature
