// GroupedLinear against its formula, and against a Linear per group bit for bit.
#include <gtest/gtest.h>

#include "ligature/kernels/run_context.h"
#include "ops_test_support.h"

using namespace ligature;

namespace {

GroupedLinearOptions options_of(int64_t groups, int64_t in, int64_t out,
                                at::ScalarType dtype = at::kDouble) {
  GroupedLinearOptions options(groups, in, out);
  options.dtype = dtype;
  return options;
}

Tensor splits_of(std::vector<int64_t> sizes) { return torch::tensor(sizes, at::kLong); }

GroupedLinear with_biases(const GroupedLinearOptions& options) {
  GroupedLinear op(options);
  torch::NoGradGuard no_grad;
  for (auto& item : op->named_parameters()) {
    if (item.key().rfind("bias", 0) == 0) item.value().normal_();
  }
  return op;
}

/// Weights, then biases, whatever the order of the parameters.
Formula formula_of(const GroupedLinearImpl& op, const std::vector<int64_t>& sizes) {
  return [&op, sizes](const Tensor& x, const Tensors& extras, const Tensors& params) -> Tensors {
    const auto group = [&](size_t first, bool single, int64_t g) {
      return single ? params[first][g] : params[first + static_cast<size_t>(g)];
    };
    const Tensor rows = x.reshape({-1, op.options.in_features});
    Tensors parts;
    int64_t begin = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(sizes.size()); ++g) {
      const int64_t end = begin + sizes[g];
      Tensor y = at::matmul(rows.slice(0, begin, end),
                            group(op.first_weight(), op.options.single_grouped_weight, g).t());
      if (op.options.bias) {
        Tensor bias = group(op.first_bias(), op.options.single_grouped_bias, g).unsqueeze(0);
        if (extras.size() > 1) bias = bias * extras[1].slice(0, begin, end).unsqueeze(1);
        y = y + bias;
      }
      parts.push_back(y);
      begin = end;
    }
    parts.push_back(at::zeros({rows.size(0) - begin, op.options.out_features}, x.options()));
    at::DimVector shape(x.sizes());
    shape.back() = op.options.out_features;
    return {at::cat(parts).view(shape)};
  };
}

void expect_grouped(const GroupedLinear& op, const std::vector<int64_t>& sizes, int64_t tail,
                    at::ScalarType dtype, const std::string& where) {
  int64_t rows = tail;
  for (const int64_t size : sizes) rows += size;
  OperationFuser fuser({op.ptr()});
  Inputs inputs{leaf({rows, op->options.in_features}, dtype).requires_grad_(), {splits_of(sizes)}};
  if (op->scales_bias()) inputs.extras.push_back(leaf({rows}, dtype).requires_grad_());
  const Tensors params = parameters_of({op.ptr()});
  expect_same_run(run_fuser(fuser, inputs, params),
                  run_formula(formula_of(*op, sizes), inputs, params), leaves_of(inputs, params),
                  where, tolerance(dtype));
}

TEST(OpsGroupedLinear, EqualsItsFormula) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (int layout = 0; layout < 8; ++layout) {
      GroupedLinearOptions options = options_of(3, 12, 7, dtype);
      options.single_grouped_weight = (layout & 1) != 0;
      options.single_grouped_bias = (layout & 2) != 0;
      options.scale_bias = (layout & 4) != 0;
      const GroupedLinear op = with_biases(options);
      const std::string where = std::to_string(layout) + " " + c10::toString(dtype);
      expect_grouped(op, {5, 0, 9}, 0, dtype, where);
      expect_grouped(op, {0, 4, 0}, 3, dtype, where + ", a tail");
      expect_grouped(op, {0, 0, 0}, 0, dtype, where + ", nothing");
    }
  }
}

TEST(OpsGroupedLinear, HasTheBitsOfALinearPerGroup) {
  const std::vector<int64_t> sizes{64, 0, 19, 3};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const GroupedLinear op = with_biases(options_of(4, 48, 96, dtype));
    OperationFuser fuser({op.ptr()});
    Tensor x = leaf({86, 48}, dtype).requires_grad_();
    const Tensor dy = leaf({86, 96}, dtype);
    const Tensor y = fuser(x, {splits_of(sizes)})[0];
    y.backward(dy);
    int64_t begin = 0;
    for (size_t g = 0; g < sizes.size(); ++g) {
      const auto own = [&](const char* name) {
        return op->named_parameters()[name + std::to_string(g)];
      };
      if (sizes[g] == 0) {
        EXPECT_EQ(own("weight").grad().abs().max().item<double>(), 0);
        EXPECT_EQ(own("bias").grad().abs().max().item<double>(), 0);
        continue;
      }
      LinearOptions single(48, 96, true);
      single.dtype = dtype;
      Linear linear(single);
      {
        torch::NoGradGuard no_grad;
        linear->weight().copy_(own("weight"));
        linear->bias().copy_(own("bias"));
      }
      Tensor part = x.detach().narrow(0, begin, sizes[g]).clone().requires_grad_();
      const Tensor wanted = OperationFuser({linear.ptr()})(part)[0];
      wanted.backward(dy.narrow(0, begin, sizes[g]));
      EXPECT_TRUE(at::equal(y.narrow(0, begin, sizes[g]), wanted)) << g;
      EXPECT_TRUE(at::equal(x.grad().narrow(0, begin, sizes[g]), part.grad())) << g;
      EXPECT_TRUE(at::equal(own("weight").grad(), linear->weight().grad())) << g;
      EXPECT_TRUE(at::equal(own("bias").grad(), linear->bias().grad())) << g;
      begin += sizes[g];
    }
  }
}

TEST(OpsGroupedLinear, WeightGradientsMayWait) {
  GroupedLinearOptions options = options_of(2, 6, 4);
  options.delay_wgrad_compute = true;
  GroupedLinear op(options);
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({5, 6}).requires_grad_();
  Tensor total;
  for (int step = 0; step < 2; ++step) {
    const Tensor dy = leaf({5, 4});
    fuser(x, {splits_of({2, 3})})[0].backward(dy);
    const Tensor dw = at::matmul(dy.slice(0, 0, 2).t(), x.detach().slice(0, 0, 2));
    total = total.defined() ? total + dw : dw;
  }
  const Tensor weight = op->named_parameters()["weight0"];
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(x.grad().defined());
  EXPECT_EQ(op->num_delayed(), 2U);
  op->backward_dw();
  op->backward_dw();
  EXPECT_EQ(op->num_delayed(), 0U);
  op->backward_dw();
  EXPECT_TRUE(at::allclose(weight.grad(), total));
}

TEST(OpsGroupedLinear, AddsToMainGrads) {
  GroupedLinearOptions options = options_of(2, 6, 4, at::kBFloat16);
  options.accumulate_into_main_grad = true;
  GroupedLinear op(options);
  Tensors mains;
  for (size_t g = 0; g < 2; ++g) {
    mains.push_back(at::ones({4, 6}, on_device(at::kFloat)));
    op->set_main_grad(g, mains[g], /*overwrite=*/g == 1);
  }
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({5, 6}, at::kBFloat16);
  const Tensor dy = leaf({5, 4}, at::kBFloat16);
  fuser(x, {splits_of({2, 3})})[0].backward(dy);
  const auto product = [&](int64_t begin, int64_t size) {
    return at::matmul(dy.narrow(0, begin, size).to(at::kFloat).t(),
                      x.narrow(0, begin, size).to(at::kFloat));
  };
  EXPECT_TRUE(at::allclose(mains[0], product(0, 2) + 1, 1e-5, 1e-5));
  EXPECT_TRUE(at::allclose(mains[1], product(2, 3), 1e-5, 1e-5));
  EXPECT_FALSE(op->named_parameters()["weight0"].grad().defined());
}

TEST(OpsGroupedLinear, WritesIntoTheCallersBuffers) {
  GroupedLinear op(options_of(2, 6, 4));
  OperationFuser fuser({op.ptr()});
  Tensor x = leaf({5, 6}).requires_grad_();
  const Tensor wanted = fuser(x, {splits_of({2, 3})})[0];
  const Tensor output = leaf({5, 4}), grad_input = leaf({5, 6});
  OpKwargs kwargs;
  kwargs.names = {kOutputBuffer, kGradInputBuffer};
  kwargs.tensors = {{kOutputBuffer, output}, {kGradInputBuffer, grad_input}};
  const Tensor y = fuser(x, {splits_of({2, 3})}, {kwargs})[0];
  EXPECT_TRUE(at::equal(y, wanted));
  EXPECT_EQ(y.const_data_ptr(), output.const_data_ptr());
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), grad_input));
}

TEST(OpsGroupedLinear, RefusesALaterBufferBeforeAnyKernel) {
  GroupedLinear first(options_of(2, 6, 4)), second(options_of(2, 4, 6));
  OperationFuser fuser({first.ptr(), second.ptr()});
  const Tensor splits = splits_of({2, 3}), output = at::full({5, 4}, 7.0, on_device(at::kDouble));
  std::vector<OpKwargs> kwargs(2);
  kwargs[0] = {{}, {kOutputBuffer}, {{kOutputBuffer, output}}, nullptr};
  for (const char* name : {kOutputBuffer, kGradInputBuffer}) {
    kwargs[1] = {{}, {name}, {{name, leaf({4, 6})}}, nullptr};
    EXPECT_MESSAGE(fuser(leaf({5, 6}), {splits, splits}, kwargs), std::string(name) + " must be");
    EXPECT_TRUE(at::equal(output, at::full_like(output, 7.0)));
  }
}

GroupedLinear in_layout(bool single) {
  GroupedLinearOptions options = options_of(2, 6, 4, at::kFloat);
  options.single_grouped_weight = options.single_grouped_bias = single;
  return with_biases(options);
}

TEST(OpsGroupedLinear, LoadsEitherLayoutIntoEither) {
  const Tensor x = leaf({5, 6}, at::kFloat), splits = splits_of({2, 3});
  for (const bool of_single : {false, true}) {
    const GroupedLinear saved = in_layout(of_single), loaded = in_layout(!of_single);
    std::stringstream file;
    torch::save(Sequential(saved), file);
    Sequential into(loaded);
    torch::load(into, file);
    EXPECT_TRUE(at::equal(OperationFuser({loaded.ptr()})(x, {splits})[0],
                          OperationFuser({saved.ptr()})(x, {splits})[0]));
  }
  std::stringstream file;
  torch::save(in_layout(true), file);
  GroupedLinear other(options_of(3, 6, 4, at::kFloat));
  EXPECT_MESSAGE(torch::load(other, file), "size mismatch for weight");
}

TEST(OpsGroupedLinear, RefusesBadSplits) {
  GroupedLinear op(options_of(2, 6, 4));
  OperationFuser fuser({op.ptr()});
  const Tensor x = leaf({5, 6});
  EXPECT_MESSAGE(fuser(x, {splits_of({2, 3, 0})}), "split sizes must be [num_groups=2]");
  EXPECT_MESSAGE(fuser(x, {splits_of({-2, 3})}), "group 0 must not be negative, got -2");
  EXPECT_MESSAGE(fuser(x, {splits_of({2, 4})}), "at most the input's 5 rows");
  EXPECT_MESSAGE(fuser(x, {torch::tensor({2.0, 3.0})}), "split sizes must be integers");
}

TEST(OpsGroupedLinear, TellsWhereTheHostWaits) {
  GroupedLinear op(options_of(2, 6, 4, at::kFloat));
  OperationFuser fuser({op.ptr()});
  const ExplainedPart part =
      fuser
          .explain(torch::empty({5, 6}, torch::kMeta),
                   {torch::empty({2}, torch::TensorOptions(torch::kMeta).dtype(torch::kLong))})
          .parts[0];
  EXPECT_EQ(part.ops[0].extra_inputs[0].what, "sizes of 2 groups");
  EXPECT_EQ(part.ops[0].extra_inputs[0].device, part.input.device);
  ASSERT_TRUE(part.host_syncs.has_value());
  EXPECT_EQ(*part.host_syncs, 0);  // on the CPU nobody waits
  OperationFuser other({Linear(6, 4).ptr()});
  EXPECT_FALSE(other.explain(torch::empty({5, 6}, torch::kMeta)).parts[0].host_syncs.has_value());
}

/// As if sizes were on a device: the host would have to read them.
TEST(OpsGroupedLinear, StrictRefusesToWait) {
  const kernels::MetaStandsFor device(at::kPrivateUse1);
  const kernels::Groups groups{
      2, 5, torch::empty({2}, torch::TensorOptions(torch::kMeta).dtype(torch::kLong)), {}};
  EXPECT_EQ(kernels::on_host("[GroupedLinear]", groups).starts.size(), 3U);
  const kernels::NoSyncScope no_sync(true);
  EXPECT_MESSAGE(kernels::on_host("[GroupedLinear]", groups), "strict forbids it");
}

struct NoOptions {
  template <class F>
  void fields(F&&) {}
};

/// Notes whether the host may wait, in each direction.
class Watcher : public Operation<Watcher> {
 public:
  using Options = NoOptions;
  explicit Watcher(Options = {}) : Operation("Watcher") {}

  Value op_forward(OperationContext&, const Value& input, const OpArgs&) override {
    seen.push_back(kernels::run_context().no_sync);
    return at::mul(input.tensor(), 2);
  }
  OpBackwardResult op_backward(OperationContext&, const Value& grad_output) override {
    seen.push_back(kernels::run_context().no_sync);
    return {at::mul(grad_output.tensor(), 2), {}};
  }

  Options options;
  std::vector<bool> seen;
};

TEST(OpsGroupedLinear, StrictHoldsInBackwardToo) {
  for (const bool strict : {false, true}) {
    const auto op = std::make_shared<Watcher>();
    FuserOptions options;
    if (strict) options.strict = {kNoSync};
    OperationFuser fuser({op}, options);
    fuser(leaf({5, 6}).requires_grad_())[0].sum().backward();
    EXPECT_EQ(op->seen, std::vector<bool>({strict, strict}));
    {
      const StrictScope scope({kNoSync});
      fuser(leaf({5, 6}).requires_grad_())[0].sum().backward();
    }
    EXPECT_TRUE(op->seen.back());
    EXPECT_FALSE(kernels::run_context().no_sync);
  }
}

}  // namespace
