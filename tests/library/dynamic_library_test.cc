#include "server/library/dynamic_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/library/nvidia_libraries.h"

namespace lmhead {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(DynamicLibrary, AFunctionOfALibraryThatIsThereCanBeCalled) {
  auto library = DynamicLibrary::Open("libm", {"libm.so.6"});
  ASSERT_TRUE(library.ok()) << library.status();
  double (*hypot)(double, double) = nullptr;
  library->Resolve("hypot", &hypot);
  ASSERT_TRUE(library->Check().ok()) << library->Check();
  EXPECT_EQ(hypot(3, 4), 5);
}

TEST(DynamicLibrary, TheFirstFileThatIsThereIsOpened) {
  auto library = DynamicLibrary::Open("libm", {"libnothing.so.1", "libm.so.6", "libnone.so.2"});
  EXPECT_TRUE(library.ok()) << library.status();
}

TEST(DynamicLibrary, AMissingLibraryIsUnavailableWithEveryFileThatWasTried) {
  const auto library = DynamicLibrary::Open("Nothing", {"libnothing.so.1", "/none/libnothing.so"});
  EXPECT_TRUE(absl::IsUnavailable(library.status())) << library.status();
  EXPECT_THAT(std::string(library.status().message()),
              AllOf(HasSubstr("Nothing was not found"), HasSubstr("libnothing.so.1: "),
                    HasSubstr("/none/libnothing.so: ")));
}

TEST(DynamicLibrary, MissingFunctionsAreUnavailableWithTheirNamesAndTheLibrarys) {
  auto library = DynamicLibrary::Open("libm", {"libm.so.6"});
  ASSERT_TRUE(library.ok()) << library.status();
  double (*present)(double) = nullptr;
  int (*missing)() = [] { return 0; };
  library->Resolve("lmhead_first", &missing);
  library->Resolve("cos", &present);
  library->Resolve("lmhead_second", &missing);
  EXPECT_EQ(missing, nullptr);
  EXPECT_NE(present, nullptr);
  const absl::Status status = library->Check();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("libm lacks"), HasSubstr("lmhead_first"), HasSubstr("lmhead_second"),
                    Not(HasSubstr("cos"))));
}

TEST(NvidiaLibraries, VersionsOfNcclAreReadInBothCodings) {
  EXPECT_EQ(NcclVersionText(2708), "2.7.8");
  EXPECT_EQ(NcclVersionText(21800), "2.18.0");
  EXPECT_EQ(NcclVersionText(22809), "2.28.9");
}

}  // namespace
}  // namespace lmhead
