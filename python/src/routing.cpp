// The functions of ligature.permutation.
#include "bindings.h"
#include "ligature/ops/permutation.h"

namespace ligature::python {
namespace {

using MaybeTensor = std::optional<Tensor>;

py::object maybe(const Tensor& t) { return t.defined() ? py::cast(t) : py::none(); }

py::tuple permute(const Tensor& inp, const MaybeTensor& probs, const Tensor& routing_map,
                  int64_t num_out_tokens, bool is_mask) {
  const Permuted out = [&] {
    py::gil_scoped_release no_gil;
    return moe_permute(inp, probs.value_or(Tensor()), routing_map, num_out_tokens,
                       is_mask ? MapType::Mask : MapType::Index);
  }();
  return py::make_tuple(out.rows, maybe(out.probs), out.row_id_map);
}

py::tuple permute_and_pad(const Tensor& inp, const Tensor& probs, const Tensor& routing_map,
                          const Tensor& tokens_per_expert, int64_t align_size) {
  const PaddedPermuted out = [&] {
    py::gil_scoped_release no_gil;
    return moe_permute_and_pad(inp, probs, routing_map, tokens_per_expert, align_size);
  }();
  return py::make_tuple(out.rows, out.probs, out.row_id_map, out.pad_offsets,
                        out.tokens_per_expert);
}

Tensor unpermute(const Tensor& inp, const Tensor& row_id_map, const MaybeTensor& merging_probs,
                 const MaybeTensor& pad_offsets) {
  py::gil_scoped_release no_gil;
  return moe_unpermute(inp, row_id_map, merging_probs.value_or(Tensor()),
                       pad_offsets.value_or(Tensor()));
}

py::tuple sort_chunks(const Tensor& inp, const MaybeTensor& probs, const Tensor& split_sizes,
                      const Tensor& sorted_index) {
  const auto out = [&] {
    py::gil_scoped_release no_gil;
    return moe_sort_chunks_by_index(inp, probs.value_or(Tensor()), split_sizes, sorted_index);
  }();
  return py::make_tuple(out.first, maybe(out.second));
}

}  // namespace

void bind_routing(py::module_& m) {
  m.def("moe_permute", &permute);
  m.def("moe_permute_and_pad", &permute_and_pad);
  m.def("moe_unpermute", &unpermute);
  m.def("moe_sort_chunks_by_index", &sort_chunks);
  m.def("resize_groups", &resize_groups, py::call_guard<py::gil_scoped_release>());
}

}  // namespace ligature::python
