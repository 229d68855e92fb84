// What the tests of models in low precision share: recipes, a small model, and its content. All of
// it is where operations are made by default, see device.h.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <sstream>

#include "device.h"
#include "ligature/ligature.h"
#include "ligature/recipes/recipe_state.h"

namespace ligature::testing {

struct NamedRecipe {
  const char* name;
  std::function<RecipePtr()> make;
};

inline const std::vector<NamedRecipe>& model_recipes() {
  static const std::vector<NamedRecipe> all = {
      {"delayed",
       [] {
         return std::make_shared<DelayedScaling>(DelayedScalingOptions{.amax_history_len = 4});
       }},
      {"current", [] { return std::make_shared<Float8CurrentScaling>(); }},
      {"block", [] { return std::make_shared<Float8BlockScaling>(); }},
      {"block 1x128",
       [] {
         return std::make_shared<Float8BlockScaling>(
             Float8BlockScalingOptions{.use_f32_scales = true, .w_block_scaling_dim = 1});
       }},
      {"mxfp8", [] { return std::make_shared<MXFP8BlockScaling>(); }},
      {"nvfp4",
       [] {
         return std::make_shared<NVFP4BlockScaling>(
             NVFP4BlockScalingOptions{.disable_stochastic_rounding = true});
       }},
      {"nvfp4 1x16",
       [] {
         return std::make_shared<NVFP4BlockScaling>(NVFP4BlockScalingOptions{
             .disable_stochastic_rounding = true, .disable_2d_quantization = true});
       }},
  };
  return all;
}

inline QuantizerPtr weight_quantizer(const RecipePtr& recipe) {
  return recipe->make_quantizer({"linear", "weight", ""}, on_device().device());
}

/// The orientations that a weight has there.
inline Usage weight_usage(const QuantizerPtr& quantizer) {
  return quantizer->usage_for({}, on_device().device());
}

/// With weights in the recipe's format; without a recipe in `dtype`.
inline Sequential make_model(const RecipePtr& recipe, at::ScalarType dtype = at::kFloat) {
  const QuantizedModelInit init({.recipe = recipe, .enabled = recipe != nullptr});
  LayerNormOptions norm(40);
  LinearOptions fc1(40, 64);
  BasicLinearOptions fc2(64, 40);
  norm.dtype = fc1.dtype = fc2.dtype = dtype;
  return Sequential(LayerNorm(norm), Linear(fc1), GELU(), BasicLinear(fc2));
}

inline Tensor weight_of(const Sequential& model, size_t index) {
  return (*model)[index]->named_parameters()["weight"];
}
inline Tensor values_of(const Tensor& weight) { return Value(weight.detach()).dequantized(); }

/// The outputs of these steps, one after another.
inline std::vector<Tensor> train(Sequential model, const RecipePtr& recipe, int steps = 2) {
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  std::vector<Tensor> out;
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(step);
    optimizer.zero_grad();
    Tensor y;
    {
      Autocast autocast({.recipe = recipe});
      y = model->forward(torch::randn({16, 40}, on_device()) * (step + 1));
    }
    y.square().sum().backward();
    optimizer.step();
    out.push_back(y.detach());
  }
  return out;
}

/// Every plain tensor in which a model keeps something, its recipe state too.
inline std::vector<Tensor> content(const Sequential& model) {
  std::vector<Tensor> out;
  for (size_t i = 0; i < model->size(); ++i) {
    auto op = std::dynamic_pointer_cast<FusibleOperation>((*model)[i]);
    for (const auto& item : op->named_parameters()) {
      const QuantizedPtr quantized = quantized_of(item.value());
      const auto parts = quantized ? quantized->tensors() : std::vector<Tensor>{item.value()};
      for (const Tensor& part : parts) out.push_back(part.detach().clone());
    }
    for (const RecipeState& state : recipe_states(*op->recipe_state_owner())) {
      for (const auto* mode : {&state.forward, &state.backward}) {
        for (const DelayedTensors& t : *mode) {
          out.insert(out.end(), {t.scale, t.amax, t.history});
        }
      }
    }
  }
  return out;
}

inline bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].scalar_type() != b[i].scalar_type() || !a[i].equal(b[i])) return false;
  }
  return true;
}

/// An archive as a tree of tensors, so that a test can change one.
struct Entries {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, Entries> below;

  Entries() = default;
  explicit Entries(torch::serialize::InputArchive& archive) {
    for (const std::string& key : archive.keys()) {
      c10::IValue value;
      archive.read(key, value);
      if (value.isTensor()) {
        tensors[key] = value.toTensor();
      } else {
        torch::serialize::InputArchive inner;
        archive.read(key, inner);
        below.emplace(key, Entries(inner));
      }
    }
  }
  void write(torch::serialize::OutputArchive& archive) const {
    for (const auto& [key, tensor] : tensors) archive.write(key, tensor, /*is_buffer=*/true);
    for (const auto& [key, entries] : below) {
      torch::serialize::OutputArchive inner(archive.compilation_unit());
      entries.write(inner);
      archive.write(key, inner);
    }
  }
};

template <class M>
std::string saved(const M& model) {
  std::ostringstream out;
  torch::save(model, out);
  return out.str();
}
inline std::string saved(const Entries& entries) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  entries.write(archive);
  archive.save_to(out);
  return out.str();
}
template <class M>
void load(M& model, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(model, in);
}
inline Entries entries_of(const std::string& bytes) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  return Entries(archive);
}

}  // namespace ligature::testing
