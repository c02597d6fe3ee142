// A folder that goes away with the object, and whatever is in it.

#ifndef LMHEAD_TESTS_UTIL_TEMPORARY_FOLDER_H_
#define LMHEAD_TESTS_UTIL_TEMPORARY_FOLDER_H_

#include <string>

namespace lmhead {

class TemporaryFolder {
 public:
  // Makes an empty one of its own below the system's folder for such; ends the program when it
  // cannot.
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

  // Path of `name` in it, which may be there or not.
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace lmhead

#endif  // LMHEAD_TESTS_UTIL_TEMPORARY_FOLDER_H_
