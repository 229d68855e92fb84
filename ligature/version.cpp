#include "ligature/version.h"

namespace ligature {

const char* version() { return LIGATURE_VERSION; }

}  // namespace ligature
