// What the autograd node promises, in C++: the same tests as in Python where they make sense here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

namespace ligature {
namespace {

using torch::autograd::grad;

struct Fixture {
  Fixture() {
    torch::manual_seed(2);
    linear = Linear(LinearOptions(6, 4));
    linear->to(torch::kFloat64);
    gelu = GELU();
    x = torch::randn({5, 6}, on_device(torch::kFloat64)).requires_grad_();
  }
  Tensor run() {
    OperationFuser fuser({linear.ptr(), gelu.ptr()});
    return fuser(x)[0];
  }
  Tensor weight() const { return linear->own_parameters()["weight"]; }
  Linear linear{nullptr};
  GELU gelu{nullptr};
  Tensor x;
};

TEST(Flags, AnyNumber) {
  Flags flags;
  EXPECT_FALSE(flags.any());
  EXPECT_FALSE(flags[0] || flags[63] || flags[64] || flags[100000]);
  for (const size_t i : {0, 63, 64, 65, 1000}) flags.set(i);
  for (const size_t i : {0, 63, 64, 65, 1000}) EXPECT_TRUE(flags[i]) << i;
  for (const size_t i : {1, 62, 66, 999, 1001}) EXPECT_FALSE(flags[i]) << i;
  const Flags copy = flags;
  flags.clear();
  EXPECT_FALSE(flags.any() || flags[1000]);
  EXPECT_TRUE(copy.any() && copy[1000]);
  Flags last;
  last.set(64);
  EXPECT_TRUE(last.any());
}

/// The input times the sum of its many parameters.
class ManyImpl : public Operation<ManyImpl> {
 public:
  struct Options {
    template <class F>
    void fields(F&&) {}
  };
  explicit ManyImpl(Options given = {}) : Operation("Many"), options(given) {
    for (int i = 0; i < 130; ++i) {
      register_parameter("p" + std::to_string(i), torch::randn({}, on_device(torch::kFloat64)));
    }
  }
  OpForwardResult op_forward_compute(const Value& input, const OpArgs& args) override {
    return {input.tensor() * at::stack(args.params).sum(), {}};
  }
  void op_forward_save_ctx(OperationContext& ctx, const Value& input, ToSave&,
                           const OpArgs& args) override {
    ctx.save_for_backward({input, at::stack(args.params).sum()});
  }
  OpBackwardResult op_backward(OperationContext& ctx, const Value& dy) override {
    std::vector<Tensor> grads(130);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (ctx.requires_grad.param(i)) grads[i] = (dy.tensor() * ctx.saved_tensor(0)).sum();
    }
    return {dy.tensor() * ctx.saved_tensor(1), grads};
  }
  Options options;
};

TEST(Autograd, MoreThan64Parameters) {
  auto op = std::make_shared<ManyImpl>();
  const auto parameters = op->parameters();
  for (const size_t frozen : {5, 64, 129}) parameters[frozen].set_requires_grad(false);
  const Tensor x = torch::randn({7}, on_device(torch::kFloat64)).requires_grad_();
  OperationFuser({op})(x)[0].sum().backward();
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_EQ(parameters[i].grad().defined(), i != 5 && i != 64 && i != 129) << i;
    if (parameters[i].grad().defined()) expect_close(parameters[i].grad(), x.sum(), "dp");
  }
  expect_close(x.grad(), at::full({7}, at::stack(parameters).sum().item<double>(), x.options()),
               "dx");
}

TEST(Autograd, RetainGraphGivesTheSameGradientsTwice) {
  Fixture f;
  Tensor y = f.run();
  auto first = grad({y.sum()}, {f.x, f.weight()}, {}, /*retain_graph=*/true);
  auto second = grad({y.sum()}, {f.x, f.weight()});
  expect_same_bits(first[0], second[0], "dx");
  expect_same_bits(first[1], second[1], "dw");
}

TEST(Autograd, SecondBackwardWithoutRetainGraphIsRefused) {
  Fixture f;
  Tensor y = f.run();
  y.sum().backward();
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Autograd, DoubleBackwardIsRefused) {
  Fixture f;
  Tensor y = f.run();
  Tensor dy = torch::ones_like(y).requires_grad_();
  auto dx = grad({y}, {f.x}, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(dx[0].requires_grad());
  try {
    grad({dx[0].sum()}, {f.x});
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("once_differentiable"), std::string::npos);
  }
}

TEST(Autograd, InPlaceEditOfASavedTensorIsCaught) {
  Fixture f;
  Tensor y = f.run();
  {
    torch::NoGradGuard no_grad;
    f.weight().add_(1);
  }
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Autograd, SavedTensorsAreFreedByBackward) {
  Fixture f;
  Tensor z = f.x * 1;  // only the graph holds it
  c10::weak_intrusive_ptr<c10::TensorImpl> saved(z.getIntrusivePtr());
  OperationFuser fuser({f.linear.ptr(), f.gelu.ptr()});
  Tensor y = fuser(z)[0];
  z.reset();
  ASSERT_FALSE(saved.expired());
  y.sum().backward();
  EXPECT_TRUE(saved.expired());
}

TEST(Autograd, OnlyWhatIsAskedForIsComputed) {
  Fixture f;
  f.weight().set_requires_grad(false);
  Tensor y = f.run();
  auto grads = grad({y.sum()}, {f.x});
  EXPECT_TRUE(grads[0].defined());
  f.x.set_requires_grad(false);
  f.linear->own_parameters()["bias"].set_requires_grad(false);
  EXPECT_FALSE(f.run().requires_grad());
}

TEST(Autograd, NoGradAndInferenceMode) {
  Fixture f;
  Tensor reference = f.run();
  {
    torch::NoGradGuard no_grad;
    Tensor y = f.run();
    EXPECT_FALSE(y.requires_grad());
    expect_same_bits(y, reference.detach(), "no_grad");
  }
  {
    c10::InferenceMode inference;
    Tensor y = f.run();
    EXPECT_TRUE(y.is_inference());
    expect_same_bits(y, reference.detach(), "inference_mode");
  }
  EXPECT_TRUE(f.x.requires_grad());
}

TEST(Autograd, AnInputReturnedAsItIsBecomesAView) {
  Identity identity;
  OperationFuser fuser({identity.ptr()});
  Tensor x = torch::randn({3}, on_device(torch::kFloat64)).requires_grad_();
  Tensor y = fuser(x)[0];
  EXPECT_FALSE(y.is_same(x));
  EXPECT_TRUE(y.requires_grad());
  EXPECT_THROW(y.add_(1), c10::Error);
  Tensor z = fuser(x)[0];
  z.sum().backward();
  expect_close(x.grad(), torch::ones_like(x), "dx");
}

TEST(Autograd, AnInputReturnedWithoutGradientsHasNoFlag) {
  OperationFuser fuser({MakeExtraOutput().ptr(), Identity().ptr()});
  const Tensor x = torch::randn({3, 4}, on_device()).requires_grad_();
  torch::NoGradGuard no_grad;
  for (const Tensor& y : fuser(x)) EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(x.requires_grad());
}

TEST(Autograd, MainGradAccumulates) {
  BasicLinearOptions options(6, 4);
  options.accumulate_into_main_grad = true;
  options.dtype = torch::kBFloat16;
  BasicLinear linear(options);
  Tensor main = torch::ones({4, 6}, on_device(torch::kFloat32));
  linear->set_main_grad(main);
  Tensor x = torch::randn({5, 6}, on_device(torch::kBFloat16));
  OperationFuser fuser({linear.ptr()});
  fuser(x)[0].sum().backward();
  fuser(x)[0].sum().backward();
  Tensor dw = torch::ones({4, 5}, on_device(torch::kFloat64)).mm(x.to(torch::kFloat64));
  expect_close(main, 1 + 2 * dw, torch::kFloat32, "main_grad", tolerance(torch::kBFloat16));
  EXPECT_FALSE(linear->weight().grad().defined());
}

TEST(Autograd, ForwardModeIsRefused) {
  Fixture f;
  auto level = torch::autograd::forward_ad::enter_dual_level();
  Tensor dual = torch::_make_dual(f.x.detach(), torch::ones_like(f.x), level);
  OperationFuser fuser({f.gelu.ptr()});
  EXPECT_THROW(fuser(dual), c10::Error);
  torch::autograd::forward_ad::exit_dual_level(level);
}

}  // namespace
}  // namespace ligature
