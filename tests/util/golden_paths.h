// The golden cases that can be run: those of cross entropy.

#ifndef LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_
#define LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_

#include <string>
#include <vector>

namespace lmhead {

// Their files in GoldenFolder(), sorted; ends the process when one cannot be read.
std::vector<std::string> CrossEntropyGoldenPaths();

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_
