#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/util/command.h"
#include "tests/util/paths.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CommandResult Lmhead(const std::string& arguments) {
  return RunCommand(absl::StrCat("'", PathBesideTest("lmhead"), "' ", arguments, " 2>&1"));
}

TEST(HelpTest, ListsTheCommands) {
  for (const char* asked : {"help", "--help"}) {
    const CommandResult result = Lmhead(asked);
    EXPECT_EQ(result.exit_code, 0) << asked;
    EXPECT_THAT(result.output, AllOf(HasSubstr("  serve"), HasSubstr("  estimate"))) << asked;
  }
}

TEST(HelpTest, ShowsTheFlagsOfACommandAlone) {
  for (const char* asked : {"help estimate", "estimate --help"}) {
    const CommandResult result = Lmhead(asked);
    EXPECT_EQ(result.exit_code, 0) << asked;
    EXPECT_THAT(result.output, AllOf(HasSubstr("--vocab"), Not(HasSubstr("--listen")))) << asked;
  }
}

TEST(HelpTest, WhatIsNoCommandIsNamedAndExitsWithTwo) {
  for (const char* asked : {"serv", "help serv"}) {
    const CommandResult result = Lmhead(asked);
    EXPECT_EQ(result.exit_code, 2) << asked;
    EXPECT_THAT(result.output, HasSubstr("there is no command 'serv'")) << asked;
  }
}

}  // namespace
}  // namespace lmhead
