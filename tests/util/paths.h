// Where a test finds what it runs and reads, wherever its binary has been copied to, and which
// backend the tests of the whole service run on.

#ifndef LMHEAD_TESTS_UTIL_PATHS_H_
#define LMHEAD_TESTS_UTIL_PATHS_H_

#include <string>

namespace lmhead {

// Path of a file in the test binary's own folder, where every build puts executables and modules:
// `lmhead` and the like.
std::string PathBesideTest(const std::string& name);

// The golden cases: `golden` beside the test (portable folder), else the source tree's.
std::string GoldenFolder();

// The value of --backend for servers that tests start: LMHEAD_TEST_BACKEND, else `cpu`.
std::string TestBackend();

// How many GPUs the ranks of one test may be spread over: LMHEAD_TEST_GPUS, else 1.
int TestGpus();

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_PATHS_H_
