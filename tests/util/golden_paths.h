// The golden cases.

#ifndef LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_
#define LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_

#include <string>
#include <vector>

namespace lmhead {

// Their files in GoldenFolder(), sorted; ends the process when there are none.
std::vector<std::string> GoldenPaths();

// The name of a case, from its path, as a parameter of a test: "jsd_0.3" is jsd_0_3.
std::string GoldenTestName(const std::string& path);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_GOLDEN_PATHS_H_
