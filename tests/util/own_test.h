// A test of this binary in a process of its own: one that hangs, is killed or leaves early.

#ifndef LMHEAD_TESTS_UTIL_OWN_TEST_H_
#define LMHEAD_TESTS_UTIL_OWN_TEST_H_

#include <sys/types.h>

#include <map>
#include <string>

namespace lmhead {

// A file descriptor of the new process, where one is given to it.
inline constexpr int kGivenFd = 3;

// Starts this binary anew with the tests that `filter` names, whichever ones this process was told
// to run (GTEST_* of the environment: a shard, a file for results). `variables` go on top of the
// environment; `given_fd`, if not -1, becomes kGivenFd. Ends this process when it cannot be
// started: nobody is to signal or await the process -1, which is all of them.
pid_t StartOwnTest(const std::string& filter, const std::map<std::string, std::string>& variables,
                   int given_fd = -1);

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_OWN_TEST_H_
