// A format as named plain values, for checkpoints and language bindings.
#pragma once

#include "ligature/base/json_value.h"
#include "ligature/format/format.h"

namespace ligature {

JsonValue fields_of(const Format& format);
/// Fields that are not named have their defaults. Refuses names and values that no format has.
Format format_from_fields(const JsonValue& fields);

}  // namespace ligature
