#include "ligature/ops/mixture_of_experts.h"

#include "ligature/ops/combine.h"
#include "ligature/ops/dispatch.h"
#include "ligature/ops/grouped_linear.h"
#include "ligature/ops/scaled_activation.h"

namespace ligature {

OpList mixture_of_experts(const MixtureOptions& options) {
  const TopKRouterOptions& routing = options.router;
  const BasicOpPtr activation =
      options.activation != nullptr ? options.activation : ScaledSwiGLU().ptr();
  const auto* scaled = dynamic_cast<const ScaledActivationOperation*>(activation.get());
  LIGATURE_CHECK_TYPE(scaled != nullptr,
                      "[mixture_of_experts] activation must be one that takes "
                      "scales, as ScaledSwiGLU, got ",
                      activation->name());
  const int64_t parts = kernels::is_gated(scaled->spec().kind) ? 2 : 1;
  const auto linear = [&](int64_t in, int64_t out) {
    GroupedLinearOptions made(routing.num_experts, in, out);
    made.device = routing.device;
    made.dtype = routing.dtype;
    made.bias = options.bias;
    return made;
  };
  GroupedLinearOptions last = linear(options.ffn_hidden_size, routing.hidden_size);
  last.scale_bias = options.bias;
  TopKRouter router(routing);
  Dispatch dispatch(routing.num_experts);
  GroupedLinear first(linear(routing.hidden_size, parts * options.ffn_hidden_size)), second(last);
  Combine combine;

  const auto channel = [&](const char* what) { return options.name + "." + what; };
  const bool has_loss = routing.aux_loss_coeff != 0 || routing.z_loss_coeff != 0;
  using Router = TopKRouterImpl;
  router->set_extra_output_channel(Router::kExperts, channel("indices"), false);
  router->set_extra_output_channel(Router::kProbabilities, channel("probabilities"), false);
  router->set_extra_output_channel(Router::kLoss, channel("loss"), has_loss);
  router->set_extra_output_channel(Router::kCounts, channel("counts"), routing.expert_bias);
  dispatch->set_extra_input_channel(DispatchImpl::kExperts, channel("indices"));
  dispatch->set_extra_input_channel(DispatchImpl::kProbabilities, channel("probabilities"));
  dispatch->set_extra_output_channel(DispatchImpl::kSplits, channel("splits"), false);
  dispatch->set_extra_output_channel(DispatchImpl::kRowProbabilities, channel("rows"), false);
  dispatch->set_extra_output_channel(DispatchImpl::kMap, channel("map"), false);
  first->set_extra_input_channel(0, channel("splits"));
  activation->set_extra_input_channel(0, channel("rows"));
  second->set_extra_input_channel(0, channel("splits"));
  if (options.bias) second->set_extra_input_channel(1, channel("rows"));
  combine->set_extra_input_channel(CombineImpl::kMap, channel("map"));
  return {router.ptr(), dispatch.ptr(), first.ptr(), activation, second.ptr(), combine.ptr()};
}

}  // namespace ligature
