#include "ligature/recipes/checkpoint.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <cstring>

#include "ligature/format/format_fields.h"
#include "ligature/quantized/quantized_parts.h"
#include "ligature/recipes/recipe_text.h"

namespace ligature {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMostBytes = 1 << 16;
constexpr std::array<const char*, 3> kParts = {"data", "scale", "amax"};
constexpr const char* kState = "_recipe_state.";
constexpr std::array<const char*, 2> kModes = {"forward", "backward"};
constexpr std::array<const char*, 3> kDelayed = {"scale", "amax", "amax_history"};

template <class... Got>
void check_entry(bool good, const std::string& key, const std::string& wanted, const Got&... got) {
  LIGATURE_CHECK_STATE(good, "checkpoint entry '", key, "' must be ", wanted, ", got ", got...);
}

std::string shape_of(at::ScalarType dtype, at::IntArrayRef sizes) {
  return dtype_name(dtype) + sizes_string(sizes);
}
std::string shape_of(const Tensor& t) { return shape_of(t.scalar_type(), t.sizes()); }

Tensor present(const CheckpointLookup& find, const std::string& key) {
  Tensor found = find(key);
  LIGATURE_CHECK_STATE(found.defined(), "checkpoint entry '", key,
                       "' is missing, though others like it are there");
  check_readable(found, key);
  return found.detach();
}

Tensor bytes_of(const JsonValue& json) {
  const std::string text = to_json(json);
  // Not through the dispatcher: a mode that makes fake tensors must not see it.
  Tensor out =
      at::detail::empty_cpu({static_cast<int64_t>(text.size())}, at::TensorOptions(at::kByte));
  std::memcpy(out.mutable_data_ptr(), text.data(), text.size());
  return out;
}

JsonValue json_of(const CheckpointLookup& find, const std::string& key) {
  Tensor bytes = present(find, key);
  check_entry(bytes.scalar_type() == at::kByte && bytes.dim() == 1 && bytes.numel() <= kMostBytes,
              key, "uint8[n] with n up to " + std::to_string(kMostBytes), shape_of(bytes));
  bytes = bytes.cpu().contiguous();
  auto read = parse_json(
      {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())});
  check_entry(read.has_value(), key, "JSON in UTF-8", "something else");
  check_entry(read->get<JsonValue::Object>() != nullptr, key, "an object in JSON",
              to_string(*read));
  return *std::move(read);
}

void check_version(const std::string& key, const JsonValue& version) {
  const int64_t* number = version.get<int64_t>();
  check_entry(number != nullptr && *number == kVersion, key,
              "of version " + std::to_string(kVersion) + ", which this version of Ligature reads",
              to_string(version));
}

enum class Floats { Positive, ZeroOrMore };

void check_floats(const std::string& key, const Tensor& t, const std::vector<int64_t>& sizes,
                  Floats which) {
  check_entry(t.scalar_type() == at::kFloat && t.sizes() == at::IntArrayRef(sizes), key,
              shape_of(at::kFloat, sizes), shape_of(t));
  if (t.numel() == 0) return;
  check_entry(!t.isnan().any().item<bool>(), key, "numbers", "NaN among them");
  const float least = t.min().item<float>();
  if (which == Floats::ZeroOrMore) {
    check_entry(least >= 0, key, "zero or more", least);
  } else {
    check_entry(least > 0 && t.isfinite().all().item<bool>(), key, "positive and finite", least);
  }
}

void check_codes(const std::string& key, const Tensor& codes, Scaling scaling) {
  if (scaling == Scaling::MX) {
    check_entry(!(codes == 255).any().item<bool>(), key, "numbers", "NaN among them (code 255)");
  } else {
    check_entry(!((codes.bitwise_and(0x7F)) == 0x7F).any().item<bool>(), key, "numbers",
                "NaN among them (code 127)");
    check_entry(!(codes >= 0x80).any().item<bool>(), key, "zero or more",
                "a negative number (code 128 or more)");
  }
}

/// One orientation.
kernels::QuantizedMatrix read_side(const CheckpointLookup& find, const std::string& key,
                                   const Format& format, const SideLayout& layout) {
  const auto read = [&](const char* part, const PartLayout& wanted) {
    const std::string name = key + part;
    Tensor found = present(find, name);
    check_entry(wanted.fits(found), name, shape_of(wanted.dtype, wanted.sizes), shape_of(found));
    return found;
  };
  kernels::QuantizedMatrix out;
  out.data = read("data", layout.data);
  out.scale = read("scale", layout.scale);
  if (layout.scale.dtype == at::kByte) {
    check_codes(key + "scale", out.scale, format.scaling);
  } else {
    check_floats(key + "scale", out.scale, layout.scale.sizes, Floats::Positive);
  }
  if (layout.amax) {
    out.amax = read("amax", *layout.amax);
    check_floats(key + "amax", out.amax, layout.amax->sizes, Floats::ZeroOrMore);
    check_entry(!out.amax.isinf().any().item<bool>(), key + "amax", "finite", "infinity");
  } else {
    LIGATURE_CHECK_STATE(!find(key + "amax").defined(), "checkpoint entry '", key,
                         "amax' is there, but its format has none");
  }
  return out;
}

bool is_there(const CheckpointLookup& find, const std::string& key, const std::string& side) {
  return std::any_of(kParts.begin(), kParts.end(), [&](const char* part) {
    return find(key + "." + side + "_" + part).defined();
  });
}

/// What `read` gives; its error with the name of the entry.
template <class F>
auto of_entry(const std::string& key, F&& read) {
  try {
    return read();
  } catch (const c10::Error& error) {
    const std::string reason = error.what_without_backtrace();
    LIGATURE_CHECK_STATE(false, "checkpoint entry '", key,
                         "': ", reason.substr(0, reason.find('\n')));
  }
}

Format read_format(const std::string& key, const JsonValue& fields) {
  const std::string scaling = to_string(fields["scaling"]);
  check_entry(scaling == "delayed" || scaling == "current" || scaling == "block" ||
                  scaling == "mx" || scaling == "nv",
              key, "of a known scaling", scaling);
  return of_entry(key, [&] { return Quantizer(format_from_fields(fields)).format_tag(); });
}

at::ScalarType read_dtype(const std::string& key, const JsonValue& given) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    if (to_string(given) == dtype_name(dtype)) return dtype;
  }
  check_entry(false, key, "of dtype float32, bfloat16, float16", to_string(given));
  return at::kFloat;
}

}  // namespace

void check_readable(const Tensor& entry, const std::string& key) {
  const std::string why = why_unusable(entry);
  LIGATURE_CHECK_STATE(why.empty(), "checkpoint entry '", key, "' must be ", why);
  check_entry(!entry.is_meta(), key, "a tensor with memory", "one on the meta device");
}

CheckpointEntries quantized_entries(const QuantizedTensor& quantized) {
  JsonValue about;
  auto& fields = about.value.emplace<JsonValue::Object>();
  fields["version"].value = kVersion;
  fields["format"] = fields_of(quantized.format_tag());
  // Version 0.1.0 does not know this field; its files have the other formats as they were.
  if (!quantized.format_tag().scales_to_448) {
    std::get<JsonValue::Object>(fields["format"].value).erase("scales_to_448");
  }
  fields["dtype"].value = dtype_name(quantized.dtype());
  auto& shape = fields["shape"].value.emplace<JsonValue::Array>();
  for (const int64_t size : quantized.sizes()) shape.emplace_back().value = size;
  CheckpointEntries out{{"format", bytes_of(about)}};
  const auto add = [&](const std::string& side, const kernels::QuantizedMatrix& m) {
    const std::array<const Tensor*, 3> parts{&m.data, &m.scale, &m.amax};
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]->defined()) continue;
      // Both orientations may have one amax; files want two. And rows, of scales in columns.
      const bool again = std::any_of(out.begin(), out.end(), [&](const auto& item) {
        return item.second.numel() > 0 && item.second.is_alias_of(*parts[i]);
      });
      out.emplace_back(side + "_" + kParts[i],
                       again ? parts[i]->clone() : parts[i]->detach().contiguous());
    }
  };
  add("rowwise", quantized.rowwise());
  add("columnwise", quantized.columnwise());
  return out;
}

QuantizedPtr read_quantized(const CheckpointLookup& find, const std::string& key,
                            at::IntArrayRef sizes) {
  const std::string name = key + ".format";
  const bool rowwise = is_there(find, key, "rowwise");
  const bool columnwise = is_there(find, key, "columnwise");
  if (!rowwise && !columnwise && !find(name).defined()) return nullptr;
  LIGATURE_CHECK_STATE(!find(key).defined(), "checkpoint entry '", key,
                       "' is there twice: plain, and quantized as '", name, "'");
  const JsonValue about = json_of(find, name);
  check_version(name, about["version"]);
  const at::ScalarType dtype = read_dtype(name, about["dtype"]);
  JsonValue wanted;
  auto& shape = wanted.value.emplace<JsonValue::Array>();
  for (const int64_t size : sizes) shape.emplace_back().value = size;
  LIGATURE_CHECK_STATE(to_json(about["shape"]) == to_json(wanted), "size mismatch for ", key,
                       ": checkpoint entry '", name, "' says shape ", to_string(about["shape"]),
                       ", the shape in current model is ", sizes_string(sizes));
  const Format format = read_format(name, about["format"]);
  LIGATURE_CHECK_STATE(rowwise || columnwise, "checkpoint entry '", key,
                       ".rowwise_data' is missing");
  kernels::QuantizedPair parts;
  if (rowwise) {
    parts.rowwise = read_side(find, key + ".rowwise_", format, rowwise_layout(format, sizes));
  }
  if (columnwise) {
    parts.columnwise =
        read_side(find, key + ".columnwise_", format, columnwise_layout(format, sizes));
  }
  const std::string why = why_not_together(parts, [&](size_t i) {
    return "checkpoint entry '" + key + (i < 3 ? ".rowwise_" : ".columnwise_") + kParts[i % 3] +
           "'";
  });
  LIGATURE_CHECK_STATE(why.empty(), why);
  return std::make_shared<QuantizedTensor>(format, sizes.vec(), dtype, std::move(parts));
}

CheckpointEntries recipe_state_entries(const BasicOperation& op) {
  const std::vector<RecipeState> states = recipe_states(op);
  for (size_t s = states.size(); s-- > 0;) {
    const auto about = description_of(*states[s].recipe);
    if (!about) continue;
    CheckpointEntries out{{std::string(kState) + "version", at::scalar_tensor(kVersion, at::kLong)},
                          {std::string(kState) + "recipe", bytes_of(*about)}};
    bool begun = false;
    for (const char* mode : kModes) {
      const auto& tensors = mode == kModes[0] ? states[s].forward : states[s].backward;
      std::vector<Tensor> scales, amaxes, histories;
      for (const DelayedTensors& t : tensors) {
        if (!t.scale.defined()) continue;
        scales.push_back(t.scale);
        amaxes.push_back(t.amax);
        histories.push_back(t.history);
      }
      if (scales.empty() || scales.size() != tensors.size()) continue;
      const std::string prefix = std::string(kState) + mode + ".";
      const std::array<Tensor, 3> all{at::cat(scales), at::cat(amaxes), at::stack(histories, 1)};
      begun = begun || (all[0] != 1).any().item<bool>() || (all[1] != 0).any().item<bool>() ||
              (all[2] != 0).any().item<bool>();
      for (size_t i = 0; i < all.size(); ++i) out.emplace_back(prefix + kDelayed[i], all[i]);
    }
    return begun ? out : CheckpointEntries{};
  }
  return {};
}

std::vector<DelayedTensors> read_delayed(const CheckpointLookup& find, const std::string& prefix,
                                         const std::string& mode, int64_t count,
                                         const JsonValue& history_length) {
  const int64_t* length = history_length.get<int64_t>();
  check_entry(length != nullptr && *length > 0, prefix + "recipe",
              "with a positive amax_history_len", to_string(history_length));
  const std::array<std::vector<int64_t>, 3> sizes{
      {std::vector<int64_t>{count}, {count}, {*length, count}}};
  std::array<Tensor, 3> read;
  for (size_t i = 0; i < read.size(); ++i) {
    const std::string key = prefix + mode + "." + kDelayed[i];
    read[i] = present(find, key).cpu();
    check_floats(key, read[i], sizes[i], i == 0 ? Floats::Positive : Floats::ZeroOrMore);
  }
  std::vector<DelayedTensors> out;
  for (int64_t i = 0; i < count; ++i) {
    out.push_back({read[0].narrow(0, i, 1), read[1].narrow(0, i, 1), read[2].select(1, i)});
  }
  return out;
}

std::optional<RecipeState> read_recipe_state(const CheckpointLookup& find,
                                             const std::string& before, const BasicOperation& op) {
  const std::string prefix = before + kState;
  const auto first_of = [&](const char* mode) {
    for (const char* what : kDelayed) {
      if (find(prefix + mode + "." + what).defined()) return prefix + mode + "." + what;
    }
    return std::string();
  };
  if (!find(prefix + "version").defined() && !find(prefix + "recipe").defined() &&
      first_of(kModes[0]).empty() && first_of(kModes[1]).empty()) {
    return std::nullopt;
  }
  const Tensor version = present(find, prefix + "version");
  check_entry(version.scalar_type() == at::kLong && version.numel() == 1, prefix + "version",
              "int64[]", shape_of(version));
  check_version(prefix + "version", {version.item<int64_t>()});
  const JsonValue about = json_of(find, prefix + "recipe");
  LIGATURE_CHECK_STATE(
      !op.forward_quantizer_roles().empty() || !op.backward_quantizer_roles().empty(),
      "checkpoint entry '", prefix, "recipe' is for ", op.name(), ", which has no quantizers");
  RecipeState out;
  for (const char* mode : kModes) {
    const bool forward = mode == kModes[0];
    const auto count = static_cast<int64_t>(
        (forward ? op.forward_quantizer_roles() : op.backward_quantizer_roles()).size());
    LIGATURE_CHECK_STATE(count > 0 || first_of(mode).empty(), "checkpoint entry '", first_of(mode),
                         "' is for ", mode, ", where ", op.name(), " has no quantizers");
    if (count == 0) continue;
    (forward ? out.forward : out.backward) =
        read_delayed(find, prefix, mode, count, about["amax_history_len"]);
  }
  out.recipe = of_entry(prefix + "recipe", [&] { return delayed_from_description(about); });
  return out;
}

Tensor OtherLayout::value() const { return stacked ? at::stack(parts) : parts[0]; }

std::optional<OtherLayout> read_other_layout(const CheckpointLookup& find,
                                             const std::string& prefix, const FusibleOperation& op,
                                             const std::string& parameter, at::IntArrayRef sizes) {
  const auto place = op.other_place(parameter);
  if (!place) return std::nullopt;
  at::DimVector wanted(sizes);
  if (place->row) {
    wanted.insert(wanted.begin(), place->rows);
  } else {
    wanted.erase(wanted.begin());
  }
  OtherLayout out;
  out.stacked = !place->row;
  for (const std::string& entry : place->entries) {
    const std::string key = prefix + entry;
    if (const QuantizedPtr quantized = read_quantized(find, key, wanted)) {
      for (const auto& [part, tensor] : quantized_entries(*quantized)) {
        out.keys.push_back(key + "." + part);
      }
      out.parts.push_back(Value(quantized).dequantized());
    } else {
      const Tensor found = find(key);
      if (!found.defined()) return std::nullopt;
      LIGATURE_CHECK_STATE(found.sizes() == at::IntArrayRef(wanted), "size mismatch for ", key,
                           ": the shape in the checkpoint is ", sizes_string(found.sizes()),
                           ", the shape for current model is ", sizes_string(wanted));
      out.keys.push_back(key);
      out.parts.push_back(found.detach());
    }
    if (place->row) out.parts.back() = out.parts.back().select(0, *place->row);
  }
  return out;
}

}  // namespace ligature
