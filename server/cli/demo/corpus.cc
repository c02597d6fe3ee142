#include "server/cli/demo/corpus.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace lmhead::demo {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlockWordsMax = 256;
constexpr int64_t kHeldoutOneIn = 10;
constexpr int kParentsSearched = 6;

// Reads each text once.
class TextReader {
 public:
  absl::Status AddPath(const fs::path& path) {
    std::error_code error;
    if (fs::is_directory(path, error)) return AddFolder(path);
    return AddFile(path, /*binary_is_error=*/true);
  }

  absl::Status AddFolder(const fs::path& folder) {
    std::set<fs::path> paths;
    std::error_code error;
    for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end;
         it.increment(error)) {
      if (it->is_regular_file(error)) paths.insert(it->path());
    }
    if (error) {
      return absl::NotFoundError(
          absl::StrCat("cannot read folder ", folder.string(), ": ", error.message()));
    }
    for (const fs::path& path : paths) {
      if (absl::Status status = AddFile(path, /*binary_is_error=*/false); !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status AddFile(const fs::path& path, bool binary_is_error) {
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    if (error) {
      return absl::NotFoundError(absl::StrCat("cannot read ", path.string(), ": ", error.message(),
                                              "; --text wants readable files"));
    }
    if (!paths_.insert(real).second) return absl::OkStatus();
    std::ifstream stream(real, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    if (!stream.good() && !stream.eof()) {
      return absl::NotFoundError(absl::StrCat("cannot read ", path.string()));
    }
    if (text.find('\0') != std::string::npos) {
      if (!binary_is_error) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), " is not a text: it has zero bytes"));
    }
    if (contents_.insert(text).second) files_.push_back({path.string(), std::move(text)});
    return absl::OkStatus();
  }

  std::vector<TextFile> Take() { return std::move(files_); }

 private:
  std::set<fs::path> paths_;
  std::set<std::string> contents_;
  std::vector<TextFile> files_;
};

// README.md and docs/*.md of the nearest folder above `binary` that has both.
std::vector<std::string> FindProjectDocs(const fs::path& binary) {
  std::error_code error;
  fs::path folder = fs::canonical(binary, error).parent_path();
  for (int i = 0; i < kParentsSearched && !folder.empty(); ++i, folder = folder.parent_path()) {
    if (!fs::exists(folder / "README.md", error) || !fs::is_directory(folder / "docs", error)) {
      continue;
    }
    std::set<std::string> paths = {(folder / "README.md").string()};
    for (const auto& entry : fs::directory_iterator(folder / "docs", error)) {
      if (entry.path().extension() == ".md") paths.insert(entry.path().string());
    }
    return {paths.begin(), paths.end()};
  }
  return {};
}

bool IsWordByte(unsigned char c) { return absl::ascii_isalnum(c) || c >= 0x80; }

// Length of a punctuation mark outside ASCII that starts at `i`: typographic quotes, dashes,
// section and paragraph signs (U+2000 to U+206F, U+00A0 to U+00BF); 0 when there is none.
size_t WidePunctuationLength(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) {
    return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u;
  };
  if (byte(i) == 0xe2 && (byte(i + 1) == 0x80 || byte(i + 1) == 0x81) && byte(i + 2) >= 0x80) {
    return 3;
  }
  if (byte(i) == 0xc2 && byte(i + 1) >= 0xa0 && byte(i + 1) <= 0xbf) return 2;
  return 0;
}

// One past the word that starts at `i`.
size_t WordEnd(std::string_view text, size_t i) {
  size_t end = i;
  while (end < text.size()) {
    const bool inner_apostrophe =
        text[end] == '\'' && end > i && end + 1 < text.size() && absl::ascii_isalpha(text[end + 1]);
    if (!inner_apostrophe && !IsWordByte(text[end])) break;
    if (WidePunctuationLength(text, end) > 0) break;
    ++end;
  }
  return end;
}

// Which words of `num_words` are held out, as a function of their index.
bool IsHeldout(int64_t index, int64_t block_words) {
  return (index / block_words) % kHeldoutOneIn == kHeldoutOneIn / 2;
}

// Ids and positions, given the words of each text and the vocabulary.
void FillPositions(const std::vector<std::vector<std::string>>& texts, Corpus* corpus) {
  int64_t index = 0;
  for (const std::vector<std::string>& words : texts) {
    corpus->ids.insert(corpus->ids.end(), kContextWords, Vocabulary::kDocumentStart);
    for (const std::string& word : words) {
      auto& positions = IsHeldout(index++, corpus->block_words) ? corpus->heldout_positions
                                                                : corpus->training_positions;
      positions.push_back(static_cast<int32_t>(corpus->ids.size()));
      corpus->ids.push_back(corpus->vocabulary.Id(word));
    }
  }
}

void FillEntropies(Corpus* corpus) {
  std::vector<int64_t> counts(corpus->vocabulary.size(), 0);
  for (int32_t position : corpus->training_positions) ++counts[corpus->ids[position]];
  const double total = static_cast<double>(corpus->training_positions.size());
  // A held-out <unk> when training has none costs as much as one seen once.
  const auto loss = [&](int32_t id) {
    return -std::log(static_cast<double>(std::max<int64_t>(counts[id], 1)) / total);
  };
  for (int32_t position : corpus->training_positions) {
    corpus->unigram_entropy += loss(corpus->ids[position]) / total;
  }
  const double num_heldout = static_cast<double>(corpus->heldout_positions.size());
  for (int32_t position : corpus->heldout_positions) {
    corpus->heldout_unigram_loss += loss(corpus->ids[position]) / num_heldout;
  }
}

}  // namespace

absl::StatusOr<std::vector<TextFile>> ReadTexts(const std::vector<std::string>& paths) {
  TextReader reader;
  for (const std::string& path : paths) {
    if (absl::Status status = reader.AddPath(path); !status.ok()) return status;
  }
  return reader.Take();
}

absl::StatusOr<std::vector<TextFile>> ReadDefaultTexts(const std::string& binary,
                                                       const std::string& licences) {
  std::error_code error;
  if (fs::is_directory(licences, error)) {
    auto files = ReadTexts({licences});
    if (!files.ok() || !files->empty()) return files;
  }
  const std::vector<std::string> docs = FindProjectDocs(binary);
  if (!docs.empty()) return ReadTexts(docs);
  return absl::NotFoundError(
      absl::StrCat("no text to train on: ", licences, " is not there, nor README.md and docs/ of ",
                   "the project; pass some English text with --text=FILE [FILE...]"));
}

std::vector<std::string> Tokenize(std::string_view text) {
  std::vector<std::string> words;
  for (size_t i = 0; i < text.size();) {
    size_t length = WidePunctuationLength(text, i);
    if (length == 0 && IsWordByte(text[i])) length = WordEnd(text, i) - i;
    if (length == 0 && absl::ascii_isgraph(text[i])) length = 1;
    if (length > 0) words.push_back(absl::AsciiStrToLower(std::string(text.substr(i, length))));
    i += std::max<size_t>(length, 1);
  }
  return words;
}

Vocabulary Vocabulary::Build(const std::vector<std::string>& words) {
  std::map<std::string, int64_t> counts;
  for (const std::string& word : words) ++counts[word];
  std::vector<std::pair<int64_t, std::string>> sorted;
  for (const auto& [word, count] : counts) {
    if (count >= 2) sorted.emplace_back(-count, word);
  }
  std::sort(sorted.begin(), sorted.end());
  sorted.resize(std::min<size_t>(sorted.size(), kSizeMax - kNumSpecial));

  Vocabulary vocabulary;
  vocabulary.words_ = {"<unk>", "<s>"};
  for (auto& [count, word] : sorted) {
    vocabulary.ids_.emplace(word, static_cast<int32_t>(vocabulary.words_.size()));
    vocabulary.words_.push_back(std::move(word));
  }
  return vocabulary;
}

int32_t Vocabulary::Id(std::string_view word) const {
  const auto it = ids_.find(std::string(word));
  return it == ids_.end() ? kUnknown : it->second;
}

int64_t Vocabulary::size() const { return std::max(num_words(), kSizeMin); }

absl::StatusOr<Corpus> BuildCorpus(const std::vector<TextFile>& files) {
  Corpus corpus;
  corpus.num_files = static_cast<int64_t>(files.size());
  std::vector<std::vector<std::string>> texts;
  int64_t num_words = 0;
  for (const TextFile& file : files) {
    corpus.num_bytes += static_cast<int64_t>(file.text.size());
    texts.push_back(Tokenize(file.text));
    num_words += static_cast<int64_t>(texts.back().size());
  }
  if (num_words < kCorpusWordsMin) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", num_words, " words in ",
                                                   files.size(), " files; at least ",
                                                   kCorpusWordsMin, " are needed to train on"));
  }
  corpus.block_words = std::clamp<int64_t>(num_words / (2 * kHeldoutOneIn), 1, kBlockWordsMax);

  std::vector<std::string> training_words;
  int64_t index = 0;
  for (const auto& words : texts) {
    for (const std::string& word : words) {
      if (!IsHeldout(index++, corpus.block_words)) training_words.push_back(word);
    }
  }
  corpus.vocabulary = Vocabulary::Build(training_words);
  FillPositions(texts, &corpus);
  FillEntropies(&corpus);
  return corpus;
}

}  // namespace lmhead::demo
