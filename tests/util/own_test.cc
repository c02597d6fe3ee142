#include "tests/util/own_test.h"

#include <spawn.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/check.h"

namespace lmhead {
namespace {

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& string : *strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

pid_t StartOwnTest(const std::string& filter, const std::map<std::string, std::string>& variables,
                   int given_fd) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!absl::StartsWith(*entry, "GTEST_")) environment.emplace_back(*entry);
  }
  for (const auto& [name, value] : variables) environment.push_back(absl::StrCat(name, "=", value));
  // The portable binary runs what its name says.
  std::vector<std::string> arguments = {program_invocation_name,
                                        absl::StrCat("--gtest_filter=", filter), "--gtest_brief=1"};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (given_fd != -1) posix_spawn_file_actions_adddup2(&actions, given_fd, kGivenFd);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  pid_t child = -1;
  const int error = posix_spawn(&child, self.c_str(), &actions, nullptr,
                                Pointers(&arguments).data(), Pointers(&environment).data());
  posix_spawn_file_actions_destroy(&actions);
  LMHEAD_CHECK(error == 0, absl::StrCat(self, ": ", std::strerror(error)));
  return child;
}

}  // namespace lmhead
