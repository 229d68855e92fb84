// GEMMs with an epilogue where no kernel has one: they are refused, and their arguments checked
// first; tensors without memory give the shapes.
#include "kernel_test_support.h"
#include "ligature/kernels/gemm.h"

namespace kernels = ligature::kernels;
using at::Tensor;
using kernels::ActivationKind;
using kernels::ActivationSpec;
using kernels::Epilogue;

namespace {

const ActivationSpec kGELU{ActivationKind::GELU}, kSwiGLU{ActivationKind::SwiGLU};

TEST(Epilogues, TheCpuHasNone) {
  const auto bfloat16 = at::TensorOptions(at::kBFloat16);
  const Tensor x = at::empty({8, 64}, bfloat16), w = at::empty({48, 64}, bfloat16);
  const Tensor z = at::empty({8, 128}, bfloat16), none;
  for (const ActivationSpec& spec : {kGELU, kSwiGLU}) {
    for (const Epilogue epilogue : {Epilogue::Activation, Epilogue::ActivationGrad}) {
      EXPECT_FALSE(kernels::has_epilogue(epilogue, &spec, at::kBFloat16, at::kCPU));
    }
    const auto forward = kernels::activated_forward(x, w, none, spec, true);
    EXPECT_FALSE(kernels::pays(forward));
    EXPECT_THROW(kernels::gemm_with_epilogue(forward), c10::Error);
  }
  EXPECT_FALSE(kernels::has_epilogue(Epilogue::BiasGrad, nullptr, at::kBFloat16, at::kCPU));
  EXPECT_FALSE(kernels::pays(kernels::weight_and_bias_grad(x, x)));
  EXPECT_THROW(kernels::gemm_with_epilogue(kernels::weight_and_bias_grad(x, x)), c10::Error);
}

TEST(Epilogues, ArgumentsAreCheckedFirst) {
  const Tensor x = at::empty({8, 64}), w = at::empty({48, 64}), none;
  const auto run = [](const kernels::GemmDesc& desc) { kernels::gemm_with_epilogue(desc); };
  EXPECT_THROW(run(kernels::activated_forward(x, w.narrow(1, 0, 32), none, kGELU, true)),
               c10::ValueError);
  EXPECT_THROW(run(kernels::activated_forward(x, w, x, kGELU, true)), c10::ValueError);
  EXPECT_THROW(run(kernels::activated_forward(x, w.narrow(0, 0, 47), none, kSwiGLU, true)),
               c10::ValueError);
  const Tensor dy = at::empty({8, 48});
  EXPECT_THROW(run(kernels::activated_input_grad(dy, w, x, kSwiGLU, false, false)),
               c10::ValueError);
  EXPECT_THROW(run(kernels::weight_and_bias_grad(x, x.narrow(0, 0, 7))), c10::ValueError);
}

TEST(Epilogues, ShapesWithoutMemory) {
  const auto meta = at::TensorOptions(at::kBFloat16).device(at::kMeta);
  const Tensor x = at::empty({2, 4, 64}, meta), w = at::empty({48, 64}, meta), none;
  const auto forward =
      kernels::gemm_with_epilogue(kernels::activated_forward(x, w, none, kSwiGLU, true));
  EXPECT_EQ(forward.y.sizes(), at::IntArrayRef({2, 4, 24}));
  EXPECT_EQ(forward.z.sizes(), at::IntArrayRef({2, 4, 48}));
  const Tensor dy = at::empty({2, 4, 48}, meta), z = at::empty({2, 4, 128}, meta);
  for (const bool over_z : {false, true}) {
    const auto backward =
        kernels::gemm_with_epilogue(kernels::activated_input_grad(dy, w, z, kSwiGLU, true, over_z));
    EXPECT_EQ(backward.y.sizes(), z.sizes());
    EXPECT_EQ(backward.y.is_same(z), over_z);
    EXPECT_EQ(backward.activated.sizes(), at::IntArrayRef({2, 4, 64}));
  }
  const auto grads = kernels::gemm_with_epilogue(kernels::weight_and_bias_grad(dy, x));
  EXPECT_EQ(grads.y.sizes(), at::IntArrayRef({48, 64}));
  EXPECT_EQ(grads.dbias.sizes(), at::IntArrayRef({48}));
}

}  // namespace
