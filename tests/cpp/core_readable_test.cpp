// Tensors that kernels cannot read as they are: none of them ends the program, and those that torch
// gives values to are computed with.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "ligature/ligature.h"
#include "tolerance.h"

namespace ligature {
namespace {

Tensor random(at::IntArrayRef sizes) { return torch::randn(sizes, on_device()); }

Tensor freed(at::IntArrayRef sizes) {
  Tensor t = random(sizes);
  t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, t.device()));
  t.storage().set_nbytes(0);
  return t;
}

Tensor shrunk(at::IntArrayRef sizes) {
  Tensor t = random(sizes);
  t.storage().set_nbytes(4);
  return t;
}

/// The values of -t, with the negative bit.
Tensor with_negative_bit(const Tensor& t) { return at::_neg_view(t); }

template <class F>
void expect_refused(const F& f, const std::vector<std::string>& words, const std::string& where) {
  try {
    f();
    ADD_FAILURE() << where << ": no error";
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    for (const auto& word : words) {
      EXPECT_NE(what.find(word), std::string::npos)
          << where << ": '" << word << "' not in " << what;
    }
  }
}

struct Odd {
  const char* name;
  std::function<Tensor(at::IntArrayRef)> make;
  std::vector<std::string> words;
};

std::vector<Odd> without_memory() {
  return {
      {"freed", freed, {"memory", "freed"}},
      {"shrunk", shrunk, {"memory", "smaller"}},
      {"sparse", [](at::IntArrayRef s) { return random(s).to_sparse(); }, {"Sparse", "to_dense()"}},
  };
}

TEST(Readable, AnInputWithoutMemoryIsRefused) {
  for (const Odd& odd : without_memory()) {
    OperationFuser fuser({LayerNorm(NormOptions({8})).ptr(), GELU().ptr()});
    expect_refused([&] { fuser(odd.make({4, 8})); },
                   {odd.words[0], odd.words[1], "[LayerNorm] input"}, odd.name);
  }
}

TEST(Readable, AnExtraInputWithoutMemoryIsRefused) {
  for (const Odd& odd : without_memory()) {
    for (const bool in_place : {false, true}) {
      AddExtraInput add(AddExtraInputOptions{in_place});
      OperationFuser alone({add.ptr()});
      OperationFuser behind({Linear(8, 8).ptr(), add.ptr()});
      for (OperationFuser* fuser : {&alone, &behind}) {
        expect_refused([&] { (*fuser)(random({4, 8}), {odd.make({4, 8})}); },
                       {odd.words[0], "[AddExtraInput] extra input 0"}, odd.name);
      }
    }
  }
}

TEST(Readable, AParameterWithoutMemoryIsRefused) {
  for (const Odd& odd : without_memory()) {
    if (std::string(odd.name) == "sparse") continue;  // no module takes it
    LayerNorm norm(NormOptions({8}));
    Bias bias(8);
    BasicLinear linear(8, 8);
    for (const auto& [op, name] :
         std::vector<std::pair<OpPtr, std::string>>{{norm.ptr(), "[LayerNorm] bias"},
                                                    {bias.ptr(), "[Bias] bias"},
                                                    {linear.ptr(), "[BasicLinear] weight"}}) {
      const std::string key = name.substr(name.find(' ') + 1);
      Tensor parameter = op->named_parameters()[key];
      parameter.set_data(odd.make(parameter.sizes()));
      OperationFuser fuser({op});
      expect_refused([&] { fuser(random({4, 8})); }, {odd.words[0], name}, odd.name);
    }
  }
}

TEST(Readable, AGradientWithoutMemoryIsRefused) {
  for (const Odd& odd : without_memory()) {
    if (std::string(odd.name) == "sparse") continue;  // autograd refuses it
    OperationFuser fuser({LayerNorm(NormOptions({8})).ptr(), GELU().ptr()});
    const Tensor y = fuser(random({4, 8}).requires_grad_())[0];
    expect_refused([&] { y.backward(odd.make({4, 8})); }, {odd.words[0], "[GELU]", "gradient"},
                   odd.name);
  }
}

TEST(Readable, SavedTensorsThatLostTheirMemoryAreRefused) {
  OperationFuser fuser({LayerNorm(NormOptions({8})).ptr()});
  Tensor x = random({4, 8}).requires_grad_();
  const Tensor y = fuser(x)[0];
  x.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, x.device()));
  x.storage().set_nbytes(0);
  expect_refused([&] { y.sum().backward(); }, {"[LayerNorm]", "saved", "memory"}, "saved input");
}

TEST(Readable, AMainGradWithoutMemoryIsRefused) {
  BasicLinearOptions options(8, 8);
  options.accumulate_into_main_grad = true;
  BasicLinear linear(options);
  linear->set_main_grad(freed({8, 8}));
  OperationFuser fuser({linear.ptr()});
  const Tensor y = fuser(random({4, 8}).requires_grad_())[0];
  expect_refused([&] { y.sum().backward(); }, {"[BasicLinear] main_grad", "memory"}, "main_grad");
}

TEST(Readable, AQuantizerRefusesATensorWithoutMemory) {
  const Quantizer quantizer{Format{}};
  for (const Odd& odd : without_memory()) {
    expect_refused([&] { quantizer.quantize(odd.make({32, 32})); }, {odd.words[0]}, odd.name);
  }
}

TEST(Readable, AQuantizedTensorWithoutMemoryIsRefused) {
  const auto quantizer = std::make_shared<Quantizer>(Format{});
  const QuantizedPtr q = quantizer->quantize(random({32, 32}));
  q->rowwise().data.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, q->device()));
  q->rowwise().data.storage().set_nbytes(0);
  expect_refused([&] { q->dequantize(); }, {"memory"}, "dequantize");
  OperationFuser fuser({LayerNorm(NormOptions({32})).ptr()});
  expect_refused([&] { fuser(wrap_quantized(q)); }, {"[LayerNorm] input", "memory"}, "input");
}

// Zeros that take no memory are zeros.
TEST(Readable, ZeroTensorsAreZeros) {
  const auto zeros = [](at::IntArrayRef s) { return at::_efficientzerotensor(s, on_device()); };
  LayerNorm norm(NormOptions({8}));
  Linear linear(8, 8);
  OperationFuser fuser({norm.ptr(), linear.ptr(), AddExtraInput().ptr()});
  const Tensor x = random({4, 8}).requires_grad_();
  const Tensor plain = torch::zeros({4, 8}, on_device());
  expect_same_bits(fuser(zeros({4, 8}), {x})[0], fuser(plain, {x})[0], "input");
  expect_same_bits(fuser(x, {zeros({4, 8})})[0], fuser(x, {plain})[0], "extra input");
  const auto dx = torch::autograd::grad({fuser(x, {plain})[0]}, {x}, {zeros({4, 8})});
  EXPECT_TRUE(dx[0].eq(0).all().item<bool>());
  expect_refused(
      [&] {
        OperationFuser in_place({AddExtraInput(AddExtraInputOptions{true}).ptr()});
        in_place(x.detach(), {zeros({4, 8})});
      },
      {"[AddExtraInput] extra input 0"}, "in place");
}

// ---- the negative bit: torch negates when values are read, kernels read memory

std::vector<OpPtr> one_of_each() {
  return {LayerNorm(NormOptions({8})).ptr(),
          RMSNorm(NormOptions({8})).ptr(),
          L2Normalization().ptr(),
          SiLU().ptr(),
          SwiGLU().ptr(),
          Bias(8).ptr(),
          Linear(8, 8).ptr(),
          Dropout(0.0).ptr(),
          ConstantScale(0.5).ptr(),
          Reshape(ReshapeOptions({2, 16})).ptr(),
          Identity().ptr()};
}

TEST(Readable, TheNegativeBitOfAnInputCounts) {
  for (const OpPtr& op : one_of_each()) {
    OperationFuser fuser({op});
    const Tensor values = random({4, 8});
    const Tensor bit = with_negative_bit(values).detach().requires_grad_();
    const Tensor plain = values.neg().requires_grad_();
    ASSERT_TRUE(bit.is_neg() && bit.is_contiguous());
    const Tensor y = fuser(bit)[0], wanted = fuser(plain)[0];
    expect_same_bits(y, wanted, op->name() + " y");
    const Tensor dy = random(y.sizes());
    const auto dx = torch::autograd::grad({y}, {bit}, {dy});
    const auto wanted_dx = torch::autograd::grad({wanted}, {plain}, {dy});
    expect_same_bits(dx[0], wanted_dx[0], op->name() + " dx");
  }
}

TEST(Readable, TheNegativeBitOfAGradientCounts) {
  for (const OpPtr& op : one_of_each()) {
    OperationFuser fuser({op});
    Tensor x = random({4, 8}).requires_grad_();
    const Tensor y = fuser(x)[0], dy = random(y.sizes());
    std::vector<Tensor> leaves{x};
    for (const Tensor& p : op->parameters()) leaves.push_back(p);
    const auto got =
        torch::autograd::grad({y}, leaves, {with_negative_bit(dy)}, /*retain_graph=*/true);
    const auto wanted = torch::autograd::grad({y}, leaves, {dy.neg()});
    for (size_t i = 0; i < leaves.size(); ++i) {
      expect_same_bits(got[i].resolve_neg(), wanted[i], op->name() + " " + std::to_string(i));
    }
  }
}

TEST(Readable, TheNegativeBitOfParametersAndExtraInputsCounts) {
  const Tensor x = random({4, 8});
  for (const OpPtr& op : {OpPtr(LayerNorm(NormOptions({8})).ptr()), OpPtr(Bias(8).ptr()),
                          OpPtr(BasicLinear(8, 8).ptr())}) {
    OperationFuser fuser({op});
    for (Tensor& parameter : op->parameters()) {
      torch::NoGradGuard no_grad;
      parameter.normal_();
    }
    std::vector<Tensor> params = op->parameters();
    for (Tensor& p : params) p.set_data(p.detach().neg());
    const Tensor wanted = fuser(x)[0];
    for (Tensor& p : params) p.set_data(with_negative_bit(p.detach().neg()));
    expect_same_bits(fuser(x)[0], wanted, op->name());
  }
  const Tensor extra = random({4, 8}), scales = random({4});
  OperationFuser add({Linear(8, 8).ptr(), AddExtraInput().ptr()});
  expect_same_bits(add(x, {with_negative_bit(extra)})[0], add(x, {extra.neg()})[0], "extra input");
  OperationFuser scaled({ScaledSwiGLU().ptr()});
  expect_same_bits(scaled(x, {with_negative_bit(scales)})[0], scaled(x, {scales.neg()})[0],
                   "scales");
  // An extra input that is overwritten stays the tensor that it is.
  OperationFuser in_place({Linear(8, 8).ptr(), AddExtraInput(AddExtraInputOptions{true}).ptr()});
  Tensor bit = with_negative_bit(extra.clone()), plain = extra.neg();
  torch::NoGradGuard no_grad;
  in_place(x, {bit});
  in_place(x, {plain});
  expect_close(bit.resolve_neg(), plain, "overwritten");
}

TEST(Readable, TheNegativeBitCountsForAQuantizer) {
  const auto quantizer = std::make_shared<Quantizer>(Format{});
  const Tensor x = random({32, 32});
  expect_same_bits(quantizer->quantize(with_negative_bit(x))->dequantize(),
                   quantizer->quantize(x.neg())->dequantize(), "values");
}

// ---- a quantized tensor where an operation computes with plain values

Tensor in_low_precision(const Tensor& t) {
  static const auto quantizer = std::make_shared<Quantizer>(Format{});
  return wrap_quantized(quantizer->quantize(t));
}

/// A call with other parameters than the operations' own.
std::vector<Tensor> call_with(OperationFuser& fuser, const Tensor& x, std::vector<Tensor> params) {
  Call call = fuser.collect();
  call.params = std::move(params);
  call.input = x;
  return fuser.run(std::move(call));
}

TEST(Readable, AnyParameterMayBeQuantized) {
  const Tensor x = random({4, 8}).requires_grad_();
  for (const OpPtr& op : {OpPtr(LayerNorm(NormOptions({8})).ptr()),
                          OpPtr(RMSNorm(NormOptions({8})).ptr()), OpPtr(Bias(8).ptr())}) {
    OperationFuser fuser({op});
    std::vector<Tensor> quantized, plain;
    for (const Tensor& p : op->parameters()) {
      quantized.push_back(in_low_precision(random(p.sizes())).requires_grad_());
      plain.push_back(quantized.back().dequantize().detach().requires_grad_());
    }
    const Tensor y = call_with(fuser, x, quantized)[0], wanted = call_with(fuser, x, plain)[0];
    expect_same_bits(y, wanted, op->name() + " y");
    const Tensor dy = random({4, 8});
    std::vector<Tensor> leaves = quantized, plain_leaves = plain;
    leaves.push_back(x);
    plain_leaves.push_back(x);
    const auto got = torch::autograd::grad({y}, leaves, {dy});
    const auto grads = torch::autograd::grad({wanted}, plain_leaves, {dy});
    for (size_t i = 0; i < got.size(); ++i) {
      expect_same_bits(got[i], grads[i], op->name() + " gradient " + std::to_string(i));
    }
  }
}

TEST(Readable, AnExtraInputMayBeQuantized) {
  const Tensor x = random({4, 8}), values = random({4, 8});
  const Tensor q = in_low_precision(values);
  OperationFuser fuser({Linear(8, 8).ptr(), AddExtraInput().ptr()});
  expect_same_bits(fuser(x, {q})[0], fuser(x, {q.dequantize()})[0], "added");
  OperationFuser scaled({ScaledSwiGLU().ptr()});
  const Tensor scales = in_low_precision(random({4}));
  expect_same_bits(scaled(x, {scales})[0], scaled(x, {scales.dequantize()})[0], "scales");
}

}  // namespace
}  // namespace ligature
