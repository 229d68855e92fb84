#pragma once

namespace ligature {

/// As "0.1.0".
const char* version();

}  // namespace ligature
