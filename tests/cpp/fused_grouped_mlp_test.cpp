// The grouped MLP, with and without the routing around it: against its formula, and bit for bit the
// operations that it stands for, with every choice of frozen leaves.
#include <gtest/gtest.h>

#include "fused_test_support.h"
#include "ligature/fused/grouped_mlp.h"

using namespace ligature;

namespace {

// Rows of 64 bytes and more: the bits of ATen's smallest GEMMs depend on where a row begins.
constexpr int64_t kGroups = 3, kModel = 16, kHidden = 16, kRows = 11;
const std::vector<int64_t> kSplits{4, 0, 6};  // and a row past the last group

enum class Act { SwiGLU, Interleaved, GELU, ScaledSwiGLU, ScaledSReLU };

struct Shape {
  Act act = Act::SwiGLU;
  bool biases = true;
  bool scale_bias = false;
  bool single = false;
  bool routed = false;

  bool gated() const { return act != Act::GELU && act != Act::ScaledSReLU; }
  bool scaled() const { return act == Act::ScaledSwiGLU || act == Act::ScaledSReLU; }
};

std::string describe_shape(const Shape& s) {
  const char* const names[] = {"SwiGLU", "SwiGLU in blocks", "GELU", "ScaledSwiGLU", "ScaledSReLU"};
  return std::string(names[static_cast<int>(s.act)]) + (s.biases ? ", biases" : "") +
         (s.scale_bias ? ", scaled" : "") + (s.single ? ", single parameters" : "") +
         (s.routed ? ", routed" : "");
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const Act act :
       {Act::SwiGLU, Act::Interleaved, Act::GELU, Act::ScaledSwiGLU, Act::ScaledSReLU}) {
    for (const bool routed : {false, true}) {
      for (const bool single : {false, true}) {
        all.push_back({act, false, false, single, routed});
        all.push_back({act, true, false, single, routed});
        all.push_back({act, true, true, single, routed});
      }
    }
  }
  return all;
}

OpPtr make_activation(Act act) {
  SwiGLUOptions blocks;
  blocks.glu_interleave_size = 2;
  switch (act) {
    case Act::SwiGLU:
      return SwiGLU().ptr();
    case Act::Interleaved:
      return SwiGLU(blocks).ptr();
    case Act::GELU:
      return GELU().ptr();
    case Act::ScaledSwiGLU:
      return ScaledSwiGLU().ptr();
    case Act::ScaledSReLU:
      return ScaledSReLU().ptr();
  }
  return nullptr;
}

OpPtr make_grouped(int64_t in, int64_t out, const Shape& shape, bool scale_bias,
                   at::ScalarType dtype) {
  GroupedLinearOptions options(kGroups, in, out);
  options.dtype = dtype;
  options.bias = shape.biases;
  options.scale_bias = scale_bias;
  options.single_grouped_weight = shape.single;
  options.single_grouped_bias = shape.single && shape.biases;
  return GroupedLinear(options).ptr();
}

BasicOperation& basic(const OpPtr& op) { return static_cast<BasicOperation&>(*op); }

OpList make_block(const Shape& shape, at::ScalarType dtype) {
  OpList ops{
      make_grouped(kModel, shape.gated() ? 2 * kHidden : kHidden, shape, false, dtype),
      make_activation(shape.act),
      make_grouped(kHidden, kModel, shape, shape.scale_bias, dtype),
  };
  randomize_parameters(ops);
  if (!shape.routed) return ops;
  Dispatch dispatch(kGroups);
  Combine combine;
  const char* const channels[] = {"splits", "probabilities", "map"};
  for (int64_t i = 0; i < 3; ++i) dispatch->set_extra_output_channel(i, channels[i], false);
  basic(ops[0]).set_extra_input_channel(0, "splits");
  basic(ops[2]).set_extra_input_channel(0, "splits");
  if (shape.scaled()) basic(ops[1]).set_extra_input_channel(0, "probabilities");
  if (shape.scale_bias) basic(ops[2]).set_extra_input_channel(1, "probabilities");
  combine->set_extra_input_channel(0, "map");
  ops.insert(ops.begin(), dispatch.ptr());
  ops.push_back(combine.ptr());
  return ops;
}

/// What a block is given, and the leaves of it that may need a gradient together.
struct Given {
  Tensor x;
  Tensors extras;
  Tensor scales;   // of rows, or the probabilities of slots
  Tensor experts;  // of slots; undefined without routing
  std::vector<Tensors> parts;
};

Given make_inputs(const Shape& shape, const OpList& ops, at::ScalarType dtype) {
  Given given;
  const int64_t tokens = shape.routed ? 5 : kRows;
  given.x = strided_leaf({tokens, kModel}, dtype);
  const at::Device device = on_device().device();
  if (shape.routed) {
    given.experts = at::tensor({0, 2, 2, -1, 2, 0, 0, 2, 2, 3}, at::kLong).view({5, 2}).to(device);
    given.scales = at::rand({5, 2}, at::kDouble).to(on_device(dtype));
    given.extras = {given.experts, given.scales};
  } else {
    const Tensor splits = at::tensor(kSplits, at::kInt).to(device);
    given.scales = at::rand({kRows}, at::kDouble).to(on_device(dtype));
    given.extras = {splits};
    if (shape.scaled()) given.extras.push_back(given.scales);
    given.extras.push_back(splits);
    if (shape.scale_bias) given.extras.push_back(given.scales);
  }
  given.parts = {{given.x}, {given.scales}};
  const size_t at = shape.routed ? 1 : 0;
  for (const size_t i : {at, at + 2}) {
    Tensors weights, biases;
    for (const auto& item : basic(ops[i]).named_parameters()) {
      (item.key().starts_with("weight") ? weights : biases).push_back(item.value());
    }
    given.parts.push_back(std::move(weights));
    if (!biases.empty()) given.parts.push_back(std::move(biases));
  }
  return given;
}

Tensors leaves_of(const Given& given) {
  Tensors leaves;
  for (const Tensors& part : given.parts) leaves.insert(leaves.end(), part.begin(), part.end());
  return leaves;
}

void freeze_parts(const Given& given, uint64_t trained) {
  for (size_t i = 0; i < given.parts.size(); ++i) {
    for (const Tensor& t : given.parts[i]) t.requires_grad_(((trained >> i) & 1U) != 0);
  }
}

RunResult run(OperationFuser& fuser, const Given& given) {
  RunResult result;
  result.outputs = fuser(given.x, given.extras);
  result.grads = gradients(result.outputs, leaves_of(given));
  return result;
}

/// The rows of each group as a formula in float64 on the CPU, under torch's autograd.
RunResult run_formula(const Shape& shape, const Given& given) {
  Given wide = given;
  const auto in_double = [](const Tensor& t) {
    return t.detach().to(at::kCPU, at::kDouble).clone().requires_grad_(t.requires_grad());
  };
  for (Tensors& part : wide.parts) {
    for (Tensor& t : part) t = in_double(t);
  }
  wide.x = wide.parts[0][0];
  wide.scales = wide.parts[1][0];
  const auto groups_of = [&](const Tensors& part) {
    return shape.single ? part[0].unbind(0) : part;
  };
  const size_t second = shape.biases ? 4 : 3;
  const Tensors w1 = groups_of(wide.parts[2]), w2 = groups_of(wide.parts[second]);
  const Tensors b1 = shape.biases ? groups_of(wide.parts[3]) : Tensors();
  const Tensors b2 = shape.biases ? groups_of(wide.parts[second + 1]) : Tensors();

  std::vector<Tensor> rows_of;  // of each group
  const Tensor experts = given.experts.defined() ? given.experts.cpu().flatten() : Tensor();
  for (int64_t g = 0, at = 0; g < kGroups; ++g) {
    rows_of.push_back(shape.routed ? at::nonzero(experts == g).flatten()
                                   : at::arange(at, at + kSplits[g], at::kLong));
    at += kSplits[g];
  }
  Tensor y = at::zeros_like(wide.x);
  const Tensor scales = wide.scales.flatten();
  for (int64_t g = 0; g < kGroups; ++g) {
    const Tensor tokens = shape.routed ? rows_of[g].div(2, "floor") : rows_of[g];
    const Tensor scale = scales.index_select(0, rows_of[g]).unsqueeze(1);
    Tensor z = wide.x.index_select(0, tokens).matmul(w1[g].t());
    if (shape.biases) z = z + b1[g];
    Tensor a;
    if (shape.act == Act::GELU) {
      a = at::gelu(z, "tanh");
    } else if (shape.act == Act::ScaledSReLU) {
      a = at::relu(z).square();
    } else {
      const bool blocks = shape.act == Act::Interleaved;
      const Tensor halves = blocks ? z.view({-1, kHidden / 2, 2, 2}) : z.view({-1, 1, 2, kHidden});
      a = (at::silu(halves.select(2, 0)) * halves.select(2, 1)).reshape({-1, kHidden});
    }
    if (shape.scaled()) a = a * scale;
    Tensor out = a.matmul(w2[g].t());
    if (shape.biases) out = out + (shape.scale_bias ? scale * b2[g] : b2[g]);
    y = y.index_add(0, tokens, out);
  }
  RunResult result;
  result.outputs = {y};
  result.grads = gradients(result.outputs, leaves_of(wide));
  return result;
}

void expect_same_bits(const RunResult& actual, const RunResult& expected,
                      const std::string& where) {
  ASSERT_EQ(actual.grads.size(), expected.grads.size());
  EXPECT_TRUE(at::equal(actual.outputs[0], expected.outputs[0])) << where;
  EXPECT_EQ(actual.outputs[0].requires_grad(), expected.outputs[0].requires_grad()) << where;
  for (size_t i = 0; i < actual.grads.size(); ++i) {
    ASSERT_EQ(actual.grads[i].defined(), expected.grads[i].defined())
        << where << ", gradient " << i;
    if (!actual.grads[i].defined()) continue;
    EXPECT_EQ(actual.grads[i].scalar_type(), expected.grads[i].scalar_type()) << where;
    EXPECT_TRUE(at::equal(actual.grads[i], expected.grads[i])) << where << ", gradient " << i;
  }
}

TEST(FusedGroupedMLP, Fires) {
  for (const Shape& shape : shapes()) {
    const OpList ops = make_block(shape, at::kFloat);
    const Given given = make_inputs(shape, ops, at::kFloat);
    OperationFuser fuser(ops);
    fuser(given.x.requires_grad_(), given.extras);
    expect_only_step(fuser.plan()->forward, "GroupedMLP");
    expect_only_step(fuser.plan()->backward, "GroupedMLP");
    EXPECT_EQ(fuser.plan()->forward[0].op, fuser.plan()->backward[0].op);
  }
}

// Where a formula says zeros of what nothing depends on, there may be no gradient at all.
TEST(FusedGroupedMLP, EqualsItsFormula) {
  for (const Shape& shape : shapes()) {
    const OpList ops = make_block(shape, at::kDouble);
    const Given given = make_inputs(shape, ops, at::kDouble);
    freeze_parts(given, ~uint64_t{0});
    OperationFuser fuser(ops);
    const RunResult actual = run(fuser, given), expected = run_formula(shape, given);
    const std::string where = describe_shape(shape);
    expect_close(actual.outputs[0], expected.outputs[0], at::kDouble, where,
                 tolerance(at::kDouble));
    for (size_t i = 0; i < actual.grads.size(); ++i) {
      const Tensor& grad = actual.grads[i];
      const std::string which = where + ", gradient " + std::to_string(i);
      const bool used = i != 1 || shape.scaled() || shape.scale_bias;
      ASSERT_EQ(grad.defined() || !used, true) << which;
      if (!grad.defined()) continue;
      const Tensor& wanted = expected.grads[i];
      expect_close(grad.contiguous(), wanted.defined() ? wanted : at::zeros_like(grad), at::kDouble,
                   which, tolerance(at::kDouble));
    }
  }
}

TEST(FusedGroupedMLP, HasTheBitsOfItsOperationsWithAnyLeafFrozen) {
  for (const Shape& shape : shapes()) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      const OpList ops = make_block(shape, dtype);
      const Given given = make_inputs(shape, ops, dtype);
      OperationFuser fused(ops), plain(ops, unfused());
      const size_t choices = dtype == at::kFloat ? size_t{1} << given.parts.size() : 1;
      for (uint64_t frozen = 0; frozen < choices; ++frozen) {
        freeze_parts(given, ~frozen);
        expect_same_bits(run(fused, given), run(plain, given),
                         describe_shape(shape) + " " + c10::toString(dtype) + ", trained " +
                             bits(~frozen, given.parts.size()));
      }
    }
  }
}

TEST(FusedGroupedMLP, HasTheBitsOfItsOperationsUnderAutocast) {
  for (const Shape& shape : shapes()) {
    const OpList ops = make_block(shape, at::kFloat);
    const Given given = make_inputs(shape, ops, at::kFloat);
    freeze_parts(given, ~uint64_t{0});
    OperationFuser fused(ops), plain(ops, unfused());
    const auto run_in_mode = [&](OperationFuser& fuser) {
      RunResult result;
      {
        WithAutocast mode;
        result.outputs = fuser(given.x, given.extras);
      }
      result.grads = gradients(result.outputs, leaves_of(given));
      return result;
    };
    const RunResult actual = run_in_mode(fused);
    EXPECT_EQ(actual.outputs[0].scalar_type(), at::kBFloat16);
    expect_same_bits(actual, run_in_mode(plain), describe_shape(shape));
  }
}

TEST(FusedGroupedMLP, HasTheBitsOfItsOperationsInLowPrecision) {
  for (const Shape& shape : shapes()) {
    if (shape.single) continue;
    const OpList ops = make_block(shape, at::kBFloat16);
    const Given given = make_inputs(shape, ops, at::kBFloat16);
    freeze_parts(given, ~uint64_t{0});
    OperationFuser fused(ops), plain(ops, unfused());
    const auto run_in_recipe = [&](OperationFuser& fuser) {
      RunResult result;
      {
        Autocast autocast({.recipe = std::make_shared<Float8CurrentScaling>()});
        result.outputs = fuser(given.x, given.extras);
      }
      result.grads = gradients(result.outputs, leaves_of(given));
      return result;
    };
    const RunResult high = run(plain, given);
    const RunResult actual = run_in_recipe(fused);
    EXPECT_FALSE(at::equal(actual.outputs[0], high.outputs[0])) << "nothing was quantized";
    expect_same_bits(actual, run_in_recipe(plain), describe_shape(shape));
  }
}

TEST(FusedGroupedMLP, SaysWhyNot) {
  const auto reason_of = [](const OpList& ops, const FusionRule& rule) -> std::string {
    std::vector<Consideration> considered;
    apply_rule(rule, ops, {}, &considered);
    return considered.empty() ? "" : considered.front().reason;
  };
  Shape routed;
  routed.routed = true;
  OpList ops = make_block(routed, at::kFloat);
  EXPECT_EQ(reason_of(ops, grouped_mlp_with_routing_rule()), "");
  basic(ops[3]).set_extra_input_channel(0, "others");
  EXPECT_EQ(reason_of(ops, grouped_mlp_with_routing_rule()),
            "its linears have different split sizes, channel 'splits' and channel 'others'");
  ops.back() = Combine(CombineOptions(true)).ptr();
  EXPECT_EQ(reason_of(ops, grouped_mlp_with_routing_rule()), "its Combine is weighted");
  ops = make_block(routed, at::kFloat);
  ops.back() = Combine().ptr();
  EXPECT_EQ(reason_of(ops, grouped_mlp_with_routing_rule()),
            "its Combine does not take its map from its Dispatch's channel");

  ops = make_block({}, at::kFloat);
  EXPECT_EQ(reason_of(ops, grouped_mlp_rule()), "");
  SwiGLUOptions cached;
  cached.cache_quantized_input = true;
  ops[1] = SwiGLU(cached).ptr();
  EXPECT_EQ(reason_of(ops, grouped_mlp_rule()), "its activation caches a quantized input");
  ops[1] = GELU().ptr();
  EXPECT_EQ(reason_of(ops, grouped_mlp_rule()),
            "its sizes do not fit: out_features and what the activation wants are 32 and 16");
  ops[2] = GroupedLinear(kGroups + 1, kHidden, kModel).ptr();
  EXPECT_EQ(reason_of(ops, grouped_mlp_rule()),
            "its linears have different numbers of groups, 3 and 4");
}

}  // namespace
