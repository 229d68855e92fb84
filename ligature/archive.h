// Operations in archives (torch::save, torch::load): what they hold, quantized or not, in entries
// that are plain tensors.
#pragma once

#include <torch/serialize/archive.h>

#include "ligature/operation.h"

namespace ligature {

/// Refuses an archive that some operation of the model cannot take, before any is changed. `prefix`
/// is the model's place, for errors.
void check_archive(torch::nn::Module& model, torch::serialize::InputArchive& archive,
                   const std::string& prefix = "");

}  // namespace ligature
