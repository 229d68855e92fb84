// A format as named plain values, for checkpoints and language bindings.
#pragma once

#include "ligature/quantization/format.h"
#include "ligature/quantization/json_value.h"

namespace ligature {

JsonValue fields_of(const Format& format);
/// Fields that are not named have their defaults. Refuses names and values that no format has.
Format format_from_fields(const JsonValue& fields);

}  // namespace ligature
